"""DeepSpeed JSON (0.18): batch, ZeRO, precision, optimizer. Model, tensor layout and stages live in code there.

train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshwright.config.errors import RequestError
from meshwright.config.once import repeated
from meshwright.price.foreign.deepspeed_training import read_training, training_tables
from meshwright.price.foreign.dialect import (
    Dialect,
    Format,
    Keys,
    Reading,
    Source,
    check_spoken,
    parsed,
    refuse,
    table,
    unread,
    whole,
)

__all__ = ["DIALECT"]

_LOSS = "loss: the engine averages what the model returns over micro-batches and ranks; ours divides by trained tokens"
_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_KNOWN = {
    _BATCH, _MICRO, _STEPS, "zero_optimization", "bf16", "fp16", "gradient_clipping", "optimizer", "scheduler",
    "tensor_parallel", "sequence_parallel_size", "seed", "data_types", "communication_data_type", "expert_parallel",
    "zero_allow_untested_optimizer", "steps_per_print", "wall_clock_breakdown", "wandb", "tensorboard", "csv_monitor",
    "flops_profiler", "comms_logger",
}  # fmt: skip
"""Read, or logs."""

_KNOWN_ZERO = {
    "stage", "mics_shard_size", "zero_hpz_partition_size", "offload_optimizer", "offload_param", "overlap_comm",
    "contiguous_gradients", "allgather_partitions", "reduce_scatter", "allgather_bucket_size", "reduce_bucket_size",
    "sub_group_size", "round_robin_gradients", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_param_persistence_threshold", "gather_16bit_weights_on_model_save",
    "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
    "ignore_unused_parameters",
}  # fmt: skip
"""Read, or when is sent what of the same layout."""

_INSIDE = {
    "offload_optimizer": {"device", "nvme_path", "ratio", "pin_memory", "buffer_count", "buffer_size", "fast_init",
                          "pipeline_read", "pipeline_write", "pipeline", "max_in_cpu"},
    "offload_param": {"device", "nvme_path", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu"},
}  # fmt: skip
_LEFT = {
    "optimizer.params.lr": ("optimizer.learning_rate", "optimizer.min_learning_rate"),
    "optimizer.params.betas": ("optimizer.betas",), "optimizer.params.eps": ("optimizer.eps",),
    "optimizer.params.weight_decay": ("optimizer.weight_decay",),
    "scheduler.params.warmup_max_lr": ("optimizer.learning_rate", "optimizer.min_learning_rate"),
    "scheduler.params.warmup_num_steps": ("optimizer.warmup_steps",),
    "scheduler.params.total_num_steps": ("train.steps",), "gradient_clipping": ("optimizer.clip_norm",),
}  # fmt: skip
"""What "auto" leaves to another program: ours stays."""

_MOST = 3  # stages
_DEVICES = "none", "cpu", "nvme"


def _read(text: str, ranks: int | None = None) -> Reading:
    given = parsed(lambda each: json.loads(each, object_pairs_hook=_once), text, "JSON")
    if not isinstance(given, dict):
        raise RequestError("the file", "is no DeepSpeed configuration: an object is wanted", ("{...}",))
    check_spoken(Format.DEEPSPEED, given, (_BATCH, _MICRO, "zero_optimization", *sorted(_KNOWN)))
    keys: Keys = {}
    notes = [_LOSS]
    sizes = {name: given.get(name) for name in (_BATCH, _MICRO, _STEPS)}
    if auto := [name for name, size in sizes.items() if size == "auto"]:
        rule = "leaves batch sizes to another program; here they must be numbers"
        raise refuse(Format.DEEPSPEED, f'{", ".join(auto)} = "auto"', rule, (f'"{auto[0]}": 8',))
    given, left = _without_auto(given, "")
    if left:
        notes.append(f'"auto" is left to another program, ours stays: {", ".join(left)}')
    _read_degrees(given, keys)
    _read_batch(given, keys, notes, ranks)
    left_alone = set(given) - _KNOWN
    left_alone |= _read_zero(table(Format.DEEPSPEED, given, "zero_optimization"), keys, notes)
    left_alone |= read_training(given, keys, notes)
    for name in left:
        for key in _LEFT.get(name, ()):
            keys.pop(key, None)
    return Reading(keys, (*notes, *unread(left_alone)))


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


def _read_degrees(given: Mapping[str, Any], keys: Keys) -> None:
    tensor = table(Format.DEEPSPEED, given, "tensor_parallel").get("autotp_size", 1)
    keys["mesh.tp"] = whole(Format.DEEPSPEED, "tensor_parallel.autotp_size", tensor, 0) or 1
    if keys["mesh.tp"] > 1:
        keys["parallel.sequence"] = False
    if (ways := whole(Format.DEEPSPEED, "sequence_parallel_size", given.get("sequence_parallel_size", 1))) > 1:
        keys |= {"mesh.cp": ways, "parallel.context": "ulysses"}
    experts = table(Format.DEEPSPEED, given, "expert_parallel")
    if experts.get("enabled"):
        name = "expert_parallel.autoep_size"
        keys["mesh.ep"] = whole(Format.DEEPSPEED, name, experts.get("autoep_size", 1))


def _read_batch(given: Mapping[str, Any], keys: Keys, notes: list[str], ranks: int | None) -> None:
    """Two of global batch, micro-batch and steps of accumulation give the third, where the ranks are known; one alone
    means one step. Raises RequestError where they contradict each other."""
    sizes: dict[str, int | None] = {}
    for name in (_BATCH, _MICRO, _STEPS):
        sizes[name] = None if given.get(name) is None else whole(Format.DEEPSPEED, name, given[name])
    batch, micro, steps = sizes.values()
    fixed = keys["mesh.tp"] * keys.get("mesh.cp", 1)
    replicas = None
    if ranks is not None:
        if ranks % fixed:
            raise refuse(Format.DEEPSPEED, f"{ranks} ranks", f"wants a multiple of the other degrees, {fixed}")
        replicas = ranks // fixed
    elif batch and micro and steps and batch % (micro * steps) == 0:
        replicas = batch // (micro * steps)
    if batch and not micro:
        if replicas is None:
            works = ("--ranks N", f'"{_MICRO}": 1')
            raise refuse(Format.DEEPSPEED, _MICRO, "derives it from the ranks; give one of them", works)
        micro = batch // (replicas * (steps or 1))
        if micro * replicas * (steps or 1) != batch:
            rule = f"wants a multiple of {replicas} data-parallel ranks x accumulation {steps or 1}"
            raise refuse(Format.DEEPSPEED, f"{_BATCH} = {batch}", rule)
    if batch and micro and steps and (micro * steps * (replicas or 0) != batch):
        rule = f"wants micro {micro} x accumulation {steps} x {replicas or 'data-parallel'} ranks"
        raise refuse(Format.DEEPSPEED, f"{_BATCH} = {batch}", rule)
    if batch and micro and replicas and batch % (micro * replicas):
        rule = f"wants a multiple of {replicas} data-parallel ranks x {_MICRO}"
        raise refuse(Format.DEEPSPEED, f"{_BATCH} = {batch}", rule)
    keys["batch.micro"] = micro or 1
    if batch is None and micro and replicas:
        batch = micro * (steps or 1) * replicas
    if batch:
        keys["batch.global"] = batch
    else:
        notes.append(f"{_BATCH} is not given: batch.global stays; it is micro x accumulation x ranks there (--ranks N)")
    _read_replicas(keys, replicas)


def _read_replicas(keys: Keys, replicas: int | None) -> None:
    keys["mesh.dp"] = "fill"
    if replicas is None:
        return
    experts = keys.get("mesh.ep", 1)
    if replicas % experts:
        rule = f"folds experts over {replicas} data-parallel ranks, which must be a multiple of it"
        raise refuse(Format.DEEPSPEED, f"expert_parallel.autoep_size = {experts}", rule)
    keys["mesh.dp"] = replicas // experts


def _read_zero(zero: Mapping[str, Any], keys: Keys, notes: list[str]) -> set[str]:
    """Add the keys of sharding and offload; returns the names that were left alone."""
    stage = whole(Format.DEEPSPEED, "zero_optimization.stage", zero.get("stage", 0), 0)
    if stage > _MOST:
        raise refuse(Format.DEEPSPEED, f"zero_optimization.stage: {stage}", "has stages 0 to 3", ("0", "1", "2", "3"))
    keys["parallel.zero"] = stage
    if (size := whole(Format.DEEPSPEED, "mics_shard_size", zero.get("mics_shard_size", -1), -1)) > 0:
        keys["parallel.zero_shard_within"] = size
    hpz = "zero_hpz_partition_size"
    if (size := whole(Format.DEEPSPEED, hpz, zero.get(hpz, 1))) > 1:
        notes.append(f"{hpz} {size} keeps a second copy of parameters; ours has no such copy")
    offloads = {name: table(Format.DEEPSPEED, zero, name) for name in _INSIDE}
    for name, ours in (("offload_optimizer", "optimizer"), ("offload_param", "params")):
        device = offloads[name].get("device", "none") or "none"
        if device not in _DEVICES:
            raise refuse(Format.DEEPSPEED, f"{name}.device: {device}", "has no such device", _DEVICES)
        if device == "none":
            continue
        keys["parallel.offload"] = ours
        if device == "nvme":
            keys["parallel.offload_to"] = str(offloads[name].get("nvme_path") or "offload")
        if (ratio := offloads[name].get("ratio", 1.0)) != 1:
            raise refuse(Format.DEEPSPEED, f"{name}.ratio: {ratio}", "offloads a share, ours all", ("1.0",))
    if offloads["offload_optimizer"].get("device", "none") != "none":
        notes.append("offloaded optimizers update on the CPU there; ours visit the device")
        if keys["parallel.offload"] == "params":
            notes.append("offload_optimizer and offload_param: ours offloads one of them, here the parameters")
    if stage == 3:
        notes.append("ZeRO-3 releases after every module and within reuse distances there; ours after every block")
    left = {f"zero_optimization.{name}" for name in set(zero) - _KNOWN_ZERO}
    for name, inside in offloads.items():
        left |= {f"zero_optimization.{name}.{each}" for each in set(inside) - _INSIDE[name]}
    return left


def _write(source: Source) -> str:
    run, at = source.run, source.degrees
    parallel = run.parallel
    zero: dict[str, Any] = {"stage": parallel.zero}
    if parallel.zero_shard_within:
        zero["mics_shard_size"] = parallel.zero_shard_within
    if parallel.offload.value != "none":
        name = "offload_optimizer" if parallel.offload.value == "optimizer" else "offload_param"
        zero[name] = {"device": "cpu", "pin_memory": True}
        if parallel.offload_to != "memory":
            zero[name] = {"device": "nvme", "nvme_path": parallel.offload_to, "pin_memory": True}
    out: dict[str, Any] = {
        _BATCH: run.batch.global_,
        _MICRO: run.batch.micro,
        _STEPS: source.accumulation,
        "zero_optimization": zero,
        "gradient_clipping": run.optimizer.clip_norm,
        "seed": run.seed,
    }
    if at["tp"] > 1:
        out["tensor_parallel"] = {"autotp_size": at["tp"]}
    if at["cp"] > 1:
        out["sequence_parallel_size"] = at["cp"]
    if at["ep"] > 1:
        out["expert_parallel"] = {"enabled": True, "autoep_size": at["ep"]}
    return json.dumps(out | training_tables(run), indent=2) + "\n"


def _differences(source: Source) -> list[str]:
    out = [_LOSS]
    if source.run.parallel.zero == 3:
        out.append("ZeRO-3 releases after every module and within reuse distances there; ours after every block")
    if source.run.parallel.offload.value == "optimizer":
        out.append("offloaded optimizers update on the CPU there; ours visit the device")
    if source.degrees["tp"] > 1:
        out.append("autotp_size: tensor ranks there never cut the sequence (no sequence parallel)")
    return out


DIALECT = Dialect(
    _read,
    _write,
    _differences,
    frozenset({"mesh", "parallel", "batch", "optimizer", "precision", "seed"}),
    ("pp",),
)
