"""DeepSpeed JSON (0.18): batch, ZeRO, precision, optimizer. Model, tensor layout and stages live in code there.

train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshwright.config.errors import RequestError
from meshwright.config.once import repeated
from meshwright.price.foreign.dialect import (
    Dialect,
    Format,
    Keys,
    Reading,
    Source,
    check_spoken,
    number,
    parsed,
    refuse,
    table,
    whole,
)

__all__ = ["DIALECT"]

_LOSS = "loss: the engine averages what the model returns over micro-batches and ranks; ours divides by trained tokens"
_RELEASES = "ZeRO-3 releases after every module and within reuse distances there; ours after every block"
_OFFLOADED = "offloaded optimizers update on the CPU there; ours visit the device"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_KNOWN = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization", "bf16",
    "fp16", "gradient_clipping", "optimizer", "scheduler", "tensor_parallel", "sequence_parallel_size", "seed",
    "steps_per_print", "wall_clock_breakdown", "data_types", "communication_data_type", "zero_allow_untested_optimizer",
}  # fmt: skip


def _read(text: str, _ranks: int | None = None) -> Reading:
    given = parsed(lambda each: json.loads(each, object_pairs_hook=_once), text, "JSON")
    if not isinstance(given, dict):
        raise RequestError("the file", "is no DeepSpeed configuration: an object is wanted", ("{...}",))
    check_spoken(Format.DEEPSPEED, given, _KNOWN)
    keys: Keys = {}
    notes = [_LOSS]
    batch, micro = given.get("train_batch_size"), given.get("train_micro_batch_size_per_gpu")
    steps = given.get("gradient_accumulation_steps")
    sizes = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    if auto := [name for name, size in sizes.items() if size == "auto"]:
        rule = "leaves batch sizes to another program; here they must be numbers"
        raise refuse(Format.DEEPSPEED, f'{", ".join(auto)} = "auto"', rule, (f'"{auto[0]}": 8',))
    given, left = _without_auto(given, "")
    if left:
        notes.append(f'"auto" is left to another program, ours stays: {", ".join(left)}')
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if given.get(name) is not None:
            whole(Format.DEEPSPEED, name, given[name])
    if micro is None and batch and steps:
        raise refuse(Format.DEEPSPEED, "train_micro_batch_size_per_gpu", "derives it from the ranks; give it", ("1",))
    keys["batch.micro"] = micro or 1
    keys["mesh.dp"] = "fill"
    if batch and steps:
        if batch % (keys["batch.micro"] * steps):
            raise refuse(Format.DEEPSPEED, f"train_batch_size = {batch}", "wants micro x accumulation x ranks")
        keys["mesh.dp"] = batch // (keys["batch.micro"] * steps)
    if batch:
        keys["batch.global"] = batch
    else:
        notes.append("train_batch_size is not given: batch.global stays; it is micro x accumulation x ranks there")
    keys["mesh.tp"] = table(Format.DEEPSPEED, given, "tensor_parallel").get("autotp_size", 1)
    if (ways := whole(Format.DEEPSPEED, "sequence_parallel_size", given.get("sequence_parallel_size", 1))) > 1:
        keys |= {"mesh.cp": ways, "parallel.context": "ulysses"}
        if isinstance(keys["mesh.dp"], int):
            notes.append("sequence_parallel_size: their data-parallel ranks include it")
    _read_zero(table(Format.DEEPSPEED, given, "zero_optimization"), keys, notes)
    _read_training(given, keys, notes)
    if unknown := sorted(set(given) - _KNOWN):
        notes.append(f"not read: {', '.join(unknown)}")
    return Reading(keys, tuple(notes))


def _without_auto(given: Mapping[str, Any], path: str) -> tuple[dict[str, Any], list[str]]:
    """The object without what it leaves to another program, and the names of that."""
    kept: dict[str, Any] = {}
    left: list[str] = []
    for name, value in given.items():
        if value == "auto":
            left.append(path + name)
        elif isinstance(value, Mapping):
            kept[name], more = _without_auto(value, f"{path}{name}.")
            left += more
        else:
            kept[name] = value
    return kept, left


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a key given twice is refused there too."""
    if (twice := repeated(pairs)) is not None:
        raise refuse(Format.DEEPSPEED, f'"{twice}", given twice', "takes a key once")
    return dict(pairs)


def _read_zero(zero: Mapping[str, Any], keys: Keys, notes: list[str]) -> None:
    keys["parallel.zero"] = zero.get("stage", 0)
    if (size := whole(Format.DEEPSPEED, "mics_shard_size", zero.get("mics_shard_size", -1), -1)) > 0:
        keys["parallel.zero_shard_within"] = size
    hpz = "zero_hpz_partition_size"
    if (size := whole(Format.DEEPSPEED, hpz, zero.get(hpz, 1))) > 1:
        notes.append(f"{hpz} {size} keeps a second copy of parameters; ours has no such copy")
    if table(Format.DEEPSPEED, zero, "offload_optimizer").get("device", "none") != "none":
        keys["parallel.offload"] = "optimizer"
        notes.append(_OFFLOADED)
    if table(Format.DEEPSPEED, zero, "offload_param").get("device", "none") != "none":
        keys["parallel.offload"] = "params"
    if zero.get("stage", 0) == 3:
        notes.append(_RELEASES)


def _read_training(given: dict[str, Any], keys: Keys, notes: list[str]) -> None:
    on = [name for name in ("bf16", "fp16") if table(Format.DEEPSPEED, given, name).get("enabled")]
    if len(on) > 1:
        raise refuse(Format.DEEPSPEED, "bf16 and fp16", "enables one of them")
    if on:
        keys["precision.compute"] = _DTYPES[on[0]]
    if dtype := table(Format.DEEPSPEED, given, "data_types").get("grad_accum_dtype"):
        if str(dtype) not in _DTYPES:
            raise refuse(Format.DEEPSPEED, f"grad_accum_dtype: {dtype}", "has no such type", tuple(_DTYPES))
        keys["precision.reduce"] = _DTYPES[str(dtype)]
    keys["optimizer.clip_norm"] = given.get("gradient_clipping", 0.0)
    if "seed" in given:
        keys["seed"] = given["seed"]
    optimizer = table(Format.DEEPSPEED, given, "optimizer")
    values = table(Format.DEEPSPEED, optimizer, "params")
    kind = str(optimizer.get("type", "AdamW")).lower()
    if optimizer:
        if kind not in ("adam", "adamw", "sgd"):
            raise refuse(Format.DEEPSPEED, f'optimizer.type = "{kind}"', "has it, ours has not", ("AdamW",))
        keys["optimizer.kind"] = "sgd" if kind == "sgd" else "adamw"
        names = {"lr": "learning_rate", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
        keys |= {f"optimizer.{ours}": values[name] for name, ours in names.items()
                 if name in values}  # fmt: skip
        if kind == "adam" and not values.get("adam_w_mode", True):
            notes.append("adam_w_mode false: decay is added to gradients there; ours is decoupled")
        _read_schedule(given, keys, notes)


def _read_schedule(given: dict[str, Any], keys: Keys, notes: list[str]) -> None:
    """The learning rate over the steps of an optimizer that the file names."""
    scheduler = table(Format.DEEPSPEED, given, "scheduler")
    values = table(Format.DEEPSPEED, scheduler, "params")
    shapes = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    shape = str(scheduler.get("type", "WarmupLR"))
    if shape not in shapes:
        notes.append(f"scheduler {shape}: ours has not; optimizer.schedule stays")
        return
    keys["optimizer.schedule"] = shapes[shape]
    if "optimizer.learning_rate" in keys:
        keys["optimizer.min_learning_rate"] = 0.0
    if scheduler:
        keys["optimizer.warmup_steps"] = values.get("warmup_num_steps", 0)
        if "total_num_steps" in values:
            keys["train.steps"] = values["total_num_steps"]
        if "cos_min_ratio" in values and "optimizer.learning_rate" in keys:
            peak = number(Format.DEEPSPEED, "optimizer.params.lr", keys["optimizer.learning_rate"])
            ratio = number(Format.DEEPSPEED, "scheduler.params.cos_min_ratio", values["cos_min_ratio"])
            keys["optimizer.min_learning_rate"] = ratio * peak
    else:
        keys["optimizer.warmup_steps"] = 0


def _write(source: Source) -> str:
    run, at = source.run, source.degrees
    parallel, optimizer = run.parallel, run.optimizer
    zero: dict[str, Any] = {"stage": parallel.zero}
    if parallel.zero_shard_within:
        zero["mics_shard_size"] = parallel.zero_shard_within
    if parallel.offload.value != "none":
        name = "offload_optimizer" if parallel.offload.value == "optimizer" else "offload_param"
        zero[name] = {"device": "cpu" if parallel.offload_to == "memory" else "nvme", "pin_memory": True}
    out: dict[str, Any] = {
        "train_batch_size": run.batch.global_,
        "train_micro_batch_size_per_gpu": run.batch.micro,
        "gradient_accumulation_steps": source.accumulation,
        "zero_optimization": zero,
        "gradient_clipping": optimizer.clip_norm,
        "seed": run.seed,
    }
    if run.precision.compute.value in ("bfloat16", "float16"):
        theirs = {ours: name for name, ours in _DTYPES.items()}
        out[theirs[run.precision.compute.value]] = {"enabled": True}
        if reduced := theirs.get(run.precision.reduce.value):
            out["data_types"] = {"grad_accum_dtype": reduced}
    if at["tp"] > 1:
        out["tensor_parallel"] = {"autotp_size": at["tp"]}
    if at["cp"] > 1:
        out["sequence_parallel_size"] = at["cp"]
    params: dict[str, Any] = {"lr": optimizer.learning_rate, "weight_decay": optimizer.weight_decay}
    if optimizer.kind.value == "adamw":
        params |= {"betas": list(optimizer.betas), "eps": optimizer.eps}
    out["optimizer"] = {"type": {"adamw": "AdamW", "sgd": "SGD"}.get(optimizer.kind.value, "?"), "params": params}
    kind = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}[optimizer.schedule.value]
    shape: dict[str, Any] = {"warmup_num_steps": optimizer.warmup_steps}
    if kind != "WarmupCosineLR":
        shape |= {"warmup_max_lr": optimizer.learning_rate, "warmup_type": "linear"}
    else:
        peak = optimizer.learning_rate
        shape["cos_min_ratio"] = optimizer.min_learning_rate / peak if peak else 0.0
    if kind != "WarmupLR" and run.train.steps:
        shape["total_num_steps"] = run.train.steps
    out["scheduler"] = {"type": kind, "params": shape}
    return json.dumps(out, indent=2) + "\n"


def _differences(source: Source) -> list[str]:
    out = [_LOSS]
    if source.run.parallel.zero == 3:
        out.append(_RELEASES)
    if source.run.parallel.offload.value == "optimizer":
        out.append(_OFFLOADED)
    if source.degrees["tp"] > 1:
        out.append("autotp_size: tensor ranks there never cut the sequence (no sequence parallel)")
    return out


DIALECT = Dialect(
    _read, _write, _differences, frozenset({"mesh", "parallel", "batch", "optimizer", "precision", "seed"})
)
