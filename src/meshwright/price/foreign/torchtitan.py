"""torchtitan job files (TOML, release 0.2, and older names of the same keys): models by flavor, FSDP2, DTensor.

theirs                                  ours
dp_shard = D x E, ep = E                dp, ep           ep is folded into dp_shard (and cp, tp)
dp_replicate x dp_shard                 zero 3, zero_shard_within = dp_shard x cp
fsdp_reshard_after_forward "default"    true without stages, false with them
context_parallel_rotate_method          allgather (also where it is not given), alltoall = ring
stages of layers + 2 counted evenly     stages = [..]    embedding and head are a layer each there
"""

from __future__ import annotations

import tomllib
from typing import Any

import tomli_w

from meshwright.arch.catalogue import preset
from meshwright.config.errors import RequestError
from meshwright.price.foreign.dialect import (
    Dialect,
    Format,
    Keys,
    Reading,
    Source,
    check_spoken,
    number,
    parsed,
    ratio_of,
    refuse,
    sharded,
    unread,
    whole,
)
from meshwright.price.foreign.torchtitan_stages import FREED, PARTS, SCHEDULES, put_stages, read_pipeline

__all__ = ["DIALECT"]

_FLAVORS = {
    ("llama3", "8B"): "llama3.1-8b", ("llama3", "70B"): "llama3.1-70b", ("llama3", "405B"): "llama3.1-405b",
    ("qwen3", "0.6B"): "qwen3-0.6b", ("qwen3", "1.7B"): "qwen3-1.7b", ("qwen3", "4B"): "qwen3-4b",
    ("qwen3", "8B"): "qwen3-8b", ("qwen3", "14B"): "qwen3-14b", ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b", ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
    ("deepseek_v3", "671B"): "deepseek-v3",
}  # fmt: skip
_FACTOR = "lr_scheduler.min_lr_factor"
_ROTATE = "parallelism.context_parallel_rotate_method"
_OLDER = {
    "training.batch_size": "training.local_batch_size", "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.warmup_steps": "lr_scheduler.warmup_steps", "training.seed": "debug.seed",
    "lr_scheduler.lr_min": _FACTOR, "checkpoint.enable_checkpoint": "checkpoint.enable",
    **{f"training.{name}": f"parallelism.{name}" for name in (
        "tensor_parallel_degree", "data_parallel_replicate_degree", "data_parallel_shard_degree")},
    **{f"experimental.{name}": f"parallelism.{name}" for name in (
        "pipeline_parallel_degree", "context_parallel_degree", "enable_async_tensor_parallel",
        "pipeline_parallel_schedule", "pipeline_parallel_microbatches", "pipeline_parallel_split_points",
        "context_parallel_rotate_method")},
}  # fmt: skip
"""Where keys stood in older releases."""

_UNSAID = {
    "training.seq_len": 2048, "training.steps": 10_000, "training.max_norm": 1.0, "optimizer.lr": 8e-4,
    "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.1, "lr_scheduler.warmup_steps": 200,
    "activation_checkpoint.mode": "selective", "training.local_batch_size": 8,
}  # fmt: skip
"""What a key is there where it is not given."""
_WHERE_ON = frozenset({"checkpoint.interval", "parallelism.enable_async_tensor_parallel"})
"""Written where they are on: off is their default, and not every release knows the second."""

_ELSE = {
    *FREED,
    "parallelism.pipeline_parallel_split_points",
    "parallelism.pipeline_parallel_schedule_csv",
    "model.name", "model.flavor", "parallelism.fsdp_reshard_after_forward", "parallelism.pipeline_parallel_schedule",
    "training.mixed_precision_param", "training.mixed_precision_reduce", "training.enable_cpu_offload",
    "optimizer.name", "optimizer.beta1", "optimizer.beta2", "lr_scheduler.decay_type", "lr_scheduler.min_lr_factor",
    "checkpoint.enable", "lr_scheduler.decay_ratio", "model.converters", "activation_checkpoint.selective_ac_option",
    _ROTATE, PARTS, "parallelism.pipeline_parallel_microbatches", "training.dtype",
}  # fmt: skip
"""Read one by one."""

_DEGREES = tuple(f"parallelism.{name}_degree" for name in (
    "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "data_parallel_replicate",
    "data_parallel_shard", "expert_tensor_parallel",
))  # fmt: skip
_WHOLE = (
    *_DEGREES,
    "training.local_batch_size",
    "training.global_batch_size",
    "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.pipeline_parallel_layers_per_stage",
)
_LEFT = "training.global_batch_size", "parallelism.data_parallel_shard_degree"
"""-1 there is what the others leave."""

_SAME = {  # path -> key
    "training.seq_len": "data.sequence_length", "training.steps": "train.steps",
    "training.global_batch_size": "batch.global", "training.max_norm": "optimizer.clip_norm", "debug.seed": "seed",
    "parallelism.tensor_parallel_degree": "mesh.tp", "parallelism.pipeline_parallel_degree": "mesh.pp",
    "parallelism.context_parallel_degree": "mesh.cp", "parallelism.expert_parallel_degree": "mesh.ep",
    "parallelism.enable_async_tensor_parallel": "parallel.asynchronous_tensor",
    "optimizer.lr": "optimizer.learning_rate", "optimizer.eps": "optimizer.eps",
    "optimizer.weight_decay": "optimizer.weight_decay", "lr_scheduler.warmup_steps": "optimizer.warmup_steps",
    "activation_checkpoint.mode": "parallel.recompute", "compile.enable": "parallel.compile",
    "checkpoint.interval": "checkpoint.every",
}  # fmt: skip


def _read(text: str, ranks: int | None = None) -> Reading:
    tables = parsed(tomllib.loads, text, "TOML")
    flat = _flat(tables)
    check_spoken(Format.TORCHTITAN, flat, (*_SAME, *_WHOLE, *sorted(_ELSE)))
    for path in _WHOLE:
        if path in flat and (path not in _LEFT or flat[path] != -1):
            whole(Format.TORCHTITAN, path, flat[path])
    keys: Keys = {key: flat[path] for path, key in _SAME.items() if path in flat}
    notes = ["loss: divided by the trained tokens of the global batch there too"]
    told = set(flat)
    flat = {**_UNSAID, **flat}
    keys |= {_SAME[path]: value for path, value in _UNSAID.items() if path in _SAME and path not in told}
    _read_model(flat, keys, notes)
    _read_mesh(flat, keys, ranks)
    if keys.get("batch.global", -1) < 0:
        if keys["mesh.dp"] == "fill":
            works = ("--ranks N", "[training] global_batch_size = 256")
            raise refuse(Format.TORCHTITAN, "global_batch_size", "derives it from the ranks; give one of them", works)
        keys["batch.global"] = flat["training.local_batch_size"] * keys["mesh.dp"] * keys["mesh.ep"]
    read_pipeline(flat, keys)
    if (name := flat.get("optimizer.name", "AdamW")) != "AdamW":
        raise refuse(Format.TORCHTITAN, f"optimizer.name = {name}", "has it, ours has not", ("AdamW",))
    keys["optimizer.kind"] = "adamw"
    keys["optimizer.betas"] = [flat.get("optimizer.beta1", 0.9), flat.get("optimizer.beta2", 0.95)]
    _read_schedule(flat, keys, notes)
    _read_precision(flat, keys, notes)
    if flat.get("training.enable_cpu_offload"):
        keys["parallel.offload"] = "params"
        notes.append("enable_cpu_offload moves parameters, gradients and optimizer state; ours moves parameters")
    if not flat.get("checkpoint.enable", False):
        keys.pop("checkpoint.every", None)
    elif "checkpoint.every" not in keys:
        keys["checkpoint.every"] = 500
    if flat.get("activation_checkpoint.mode") == "selective":
        option = str(flat.get("activation_checkpoint.selective_ac_option", "op"))
        kept = "every other product" if option == "op" else f"all but every {option}th block"
        notes.append(f"selective recomputation there keeps {kept}; ours repeats what is cheap")
    return Reading(keys, (*notes, *unread(told - set(_SAME) - set(_DEGREES) - set(_WHOLE) - _ELSE)))


def _flat(tables: dict[str, Any]) -> dict[str, Any]:
    """Values by `section.key`, under the names of today. Raises RequestError where one is given under both."""
    flat = {name: value for name, value in tables.items() if not isinstance(value, dict)}
    flat |= {f"{section}.{name}": value for section, table in tables.items() if isinstance(table, dict)
             for name, value in table.items()}  # fmt: skip
    for older in _OLDER.keys() & flat.keys():
        if flat.get(_OLDER[older], flat[older]) != flat[older]:
            raise refuse(Format.TORCHTITAN, f"{older} and {_OLDER[older]}", "has one of them", (_OLDER[older],))
        flat[_OLDER[older]] = flat.pop(older)
    return flat


def _read_schedule(flat: dict[str, Any], keys: Keys, notes: list[str]) -> None:
    kind = flat.get("lr_scheduler.decay_type", "linear")
    if kind not in ("linear", "cosine"):
        works = ("linear", "cosine")
        raise refuse(Format.TORCHTITAN, f"lr_scheduler.decay_type = {kind}", "has it, ours has not", works)
    keys["optimizer.schedule"] = kind
    least = {"optimizer.lr": flat["optimizer.lr"], _FACTOR: flat.get(_FACTOR, 0.0)}
    peak, factor = (number(Format.TORCHTITAN, path, value) for path, value in least.items())
    keys["optimizer.min_learning_rate"] = peak * factor
    if (ratio := flat.get("lr_scheduler.decay_ratio")) is not None:
        if number(Format.TORCHTITAN, "lr_scheduler.decay_ratio", ratio) == 0:
            keys |= {"optimizer.schedule": "constant", "optimizer.min_learning_rate": 0.0}
        else:
            notes.append(f"decay_ratio {ratio}: the rate falls in that last share of steps there, ours from warm-up on")


def _read_precision(flat: dict[str, Any], keys: Keys, notes: list[str]) -> None:
    keys["precision.compute"] = flat.get("training.mixed_precision_param", "bfloat16")
    keys["precision.reduce"] = flat.get("training.mixed_precision_reduce", "float32")
    if (dtype := flat.get("training.dtype", "float32")) != "float32":
        keys["precision.master"] = dtype
    converters = flat.get("model.converters") or []
    named = converters.split(",") if isinstance(converters, str) else converters
    if isinstance(named, list) and any("float8" in str(each) for each in named):
        keys["precision.compute"] = "float8"
        notes.append("converters: products of blocks in 8 bits; ours prices them, it runs none")
    elif named:
        notes.append(f"model.converters {converters}: not read")


def _read_model(flat: dict[str, Any], keys: Keys, notes: list[str]) -> None:
    name = str(flat.get("model.name", "llama3")), str(flat.get("model.flavor", "debugmodel"))
    if name in _FLAVORS:
        keys["model.preset"] = _FLAVORS[name]
        if preset(_FLAVORS[name]).experts is not None:
            keys["moe.balance"] = "bias"
    else:
        notes.append(f"model {name[0]} {name[1]} is no known flavor: give model.preset or model.hf")


def _read_mesh(flat: dict[str, Any], keys: Keys, ranks: int | None) -> None:
    if keys.get("mesh.cp", 1) > 1:
        rotate = flat.get(_ROTATE, "allgather")
        if rotate not in ("allgather", "alltoall"):
            raise refuse(Format.TORCHTITAN, f"{_ROTATE} = {rotate}", "has no such method", ("allgather", "alltoall"))
        keys["parallel.context"] = "allgather" if rotate == "allgather" else "ring"
    tp, cp, ep = (keys.setdefault(f"mesh.{name}", 1) for name in ("tp", "cp", "ep"))
    keys.setdefault("mesh.pp", 1)
    replicate = flat.get("parallelism.data_parallel_replicate_degree", 1)
    shard = flat.get("parallelism.data_parallel_shard_degree", -1)
    if flat.get("parallelism.expert_tensor_parallel_degree", tp) not in (tp, 1) or (
        ep > 1 and tp > 1 and flat.get("parallelism.expert_tensor_parallel_degree", 1) != tp
    ):
        rule = f"cuts experts otherwise than the {tp} tensor ranks, which ours cannot"
        raise refuse(Format.TORCHTITAN, f"expert_parallel_degree = {ep} with tensor_parallel_degree = {tp}", rule)
    if shard == -1 and ranks is not None:
        fixed = replicate * tp * keys["mesh.pp"] * cp
        if ranks % fixed:
            raise refuse(Format.TORCHTITAN, f"{ranks} ranks", f"wants a multiple of the other degrees, {fixed}")
        shard = ranks // fixed
    if shard == -1:
        if ep > 1 or replicate > 1:
            rule = "leaves the degree to the launcher; beside replicas or experts it must be a number"
            raise refuse(
                Format.TORCHTITAN,
                "data_parallel_shard_degree = -1",
                rule,
                ("--ranks N", "data_parallel_shard_degree = 8"),
            )
        keys |= {"mesh.dp": "fill", "parallel.zero": 3}
        return
    if shard % ep:
        rule = f"folds experts over dp_shard x cp x tp; ours must divide dp_shard = {shard}"
        raise refuse(Format.TORCHTITAN, f"expert_parallel_degree = {ep}", rule)
    keys["mesh.dp"] = replicate * shard // ep
    keys["parallel.zero"] = 3 if shard * cp > 1 else 0
    keys["parallel.zero_shard_within"] = shard * cp if replicate > 1 and shard * cp > 1 else 0


def _write(source: Source) -> str:
    run, at = source.run, source.degrees
    tables: dict[str, dict[str, Any]] = {}

    def put(path: str, value: Any) -> None:
        section, name = path.split(".")
        tables.setdefault(section, {})[name] = value

    for path, key in _SAME.items():
        section, _, name = key.partition(".")
        part = getattr(run, section)
        value = getattr(part, {"global": "global_"}.get(name, name)) if name else part
        if value is not None and (value or path not in _WHERE_ON):
            put(path, getattr(value, "value", value))
    name, flavor = next((key for key, ours in _FLAVORS.items() if ours == run.model.preset), (source.arch.family, ""))
    put("model.name", name)
    put("model.flavor", flavor or "custom")
    shards = _shards(source)
    put("parallelism.data_parallel_shard_degree", shards)
    put("parallelism.data_parallel_replicate_degree", at["dp"] * at["ep"] // shards)
    if at["ep"] > 1:
        put("parallelism.expert_tensor_parallel_degree", at["tp"])
    put("parallelism.fsdp_reshard_after_forward", "always" if run.parallel.reshard_after_forward else "never")
    if at["pp"] > 1:
        put("parallelism.pipeline_parallel_schedule", SCHEDULES.get(run.parallel.schedule.value, SCHEDULES["1f1b"]))
        put("parallelism.pipeline_parallel_microbatch_size", run.batch.micro)
        put_stages(source, put)
    if at["cp"] > 1:
        put(_ROTATE, "alltoall" if run.parallel.context.value == "ring" else "allgather")
    if run.checkpoint.every:
        put("checkpoint.enable", True)
    local = run.batch.micro * (source.accumulation if at["pp"] > 1 else 1)
    put("training.local_batch_size", local)
    compute = run.precision.compute.value
    if compute not in ("bfloat16", "float32", "float8"):
        works = ("precision.compute=bfloat16", "precision.compute=float32")
        raise RequestError(f'precision.compute = "{compute}"', "torchtitan cannot express it", works)
    put("training.mixed_precision_param", "bfloat16" if compute == "float8" else compute)
    put("training.mixed_precision_reduce", "float32")
    if compute == "float8":
        put("model.converters", ["quantize.linear.float8"])
    if run.parallel.offload.value == "params":
        put("training.enable_cpu_offload", True)
    if run.optimizer.kind.value != "adamw":
        raise RequestError(f'optimizer.kind = "{run.optimizer.kind.value}"', "torchtitan cannot express it", ("adamw",))
    put("optimizer.name", "AdamW")
    put("optimizer.beta1", run.optimizer.betas[0])
    put("optimizer.beta2", run.optimizer.betas[1])
    if run.optimizer.schedule.value == "constant":
        put("lr_scheduler.decay_ratio", 0.0)
    else:
        put("lr_scheduler.decay_type", run.optimizer.schedule.value)
        put(_FACTOR, ratio_of(run.optimizer.min_learning_rate, run.optimizer.learning_rate))
    return tomli_w.dumps(tables)


def _shards(source: Source) -> int:
    """dp_shard. Raises RequestError for what it cannot say: it shards everything or nothing, and experts over it."""
    zero, ep = source.run.parallel.zero, source.degrees["ep"]
    if zero in (1, 2) and source.replicas > 1:
        works = ("parallel.zero=3", "parallel.zero=0")
        raise RequestError(f"parallel.zero = {zero}", "torchtitan cannot express it: it shards all or nothing", works)
    if ep > 1 and zero == 0:
        rule = "torchtitan cannot express it: experts are folded over sharded ranks"
        raise RequestError(f"mesh.ep = {ep} with parallel.zero = 0", rule, ("parallel.zero=3", "mesh.ep=1"))
    shards = sharded(source) if zero == 3 else 1
    if shards % ep:
        rule = f"torchtitan cannot express it: experts are folded over {shards} sharded ranks"
        raise RequestError(f"mesh.ep = {ep} with parallel.zero_shard_within", rule, ("parallel.zero_shard_within=0",))
    return shards


def _differences(source: Source) -> list[str]:
    at, parallel = source.degrees, source.run.parallel
    out = ["loss: divided by the trained tokens of the global batch there too"]
    if source.arch.experts is not None and source.run.moe.balance.value != "bias":
        out.append(f'experts: kept even by a bias there; here moe.balance = "{source.run.moe.balance.value}"')
    if at["ep"] > 1:
        out.append(f"experts: ep {at['ep']} is folded into dp_shard = dp x ep there")
    if at["pp"] > 1 and parallel.zero == 3:
        out.append("a stage: fsdp_reshard_after_forward is written out; their default keeps parameters gathered there")
    if parallel.recompute.value == "selective":
        out.append("selective recomputation there keeps every other product; ours repeats what is cheap")
    if parallel.sequence is False and at["tp"] > 1:
        out.append("sequence parallel is always on there with tp")
    return out


DIALECT = Dialect(
    _read, _write, _differences,
    frozenset({"model", "mesh", "parallel", "batch", "optimizer", "precision", "train", "seed"}),
)  # fmt: skip
