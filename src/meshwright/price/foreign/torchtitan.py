"""torchtitan job files (TOML, release 0.2): models by flavor, FSDP2, DTensor.

theirs                                  ours
dp_shard = D x E, ep = E                dp, ep           ep is folded into dp_shard (and cp, tp)
dp_replicate x dp_shard                 zero 3, zero_shard_within = dp_shard x cp
fsdp_reshard_after_forward "default"    true without stages, false with them
"""

from __future__ import annotations

import tomllib
from typing import Any

import tomli_w

from meshwright.arch.catalogue import preset
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
    unread,
    whole,
)

__all__ = ["DIALECT"]

_LOSS = "loss: divided by the trained tokens of the global batch there too"
_FLAVORS = {
    ("llama3", "8B"): "llama3.1-8b", ("llama3", "70B"): "llama3.1-70b", ("llama3", "405B"): "llama3.1-405b",
    ("qwen3", "0.6B"): "qwen3-0.6b", ("qwen3", "1.7B"): "qwen3-1.7b", ("qwen3", "4B"): "qwen3-4b",
    ("qwen3", "8B"): "qwen3-8b", ("qwen3", "14B"): "qwen3-14b", ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b", ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
    ("deepseek_v3", "671B"): "deepseek-v3",
}  # fmt: skip
_FACTOR = "lr_scheduler.min_lr_factor"
_OUTER = 2  # embedding and head count as a block each there
_WHERE_ON = frozenset({"checkpoint.interval", "parallelism.enable_async_tensor_parallel"})
"""Written where they are on: off is their default, and not every release knows the second."""

_ELSE = {
    "model.name", "model.flavor", "parallelism.fsdp_reshard_after_forward", "parallelism.pipeline_parallel_schedule",
    "training.mixed_precision_param", "training.mixed_precision_reduce", "training.enable_cpu_offload",
    "optimizer.name", "optimizer.beta1", "optimizer.beta2", "lr_scheduler.decay_type", "lr_scheduler.min_lr_factor",
    "checkpoint.enable", "checkpoint.enable_checkpoint",
}  # fmt: skip
"""Read one by one."""

_DTYPES = {
    "training.mixed_precision_param": ("bfloat16", "float32"), "training.mixed_precision_reduce": ("float32",),
}  # fmt: skip
"""What its parser takes of ours, compute and reduce."""

_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
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
    flat = {f"{section}.{name}": value for section, table in tables.items() if isinstance(table, dict)
            for name, value in table.items()}  # fmt: skip
    check_spoken(Format.TORCHTITAN, flat, {*_SAME, *_WHOLE, *_ELSE})
    for path in _WHOLE:
        if flat.get(path, -1) != -1:
            whole(Format.TORCHTITAN, path, flat[path])
    keys: Keys = {key: flat[path] for path, key in _SAME.items() if path in flat}
    notes = [_LOSS]
    _read_model(flat, keys, notes)
    _read_mesh(flat, keys, ranks)
    if keys.get("batch.global", -1) < 0:
        if keys["mesh.dp"] == "fill":
            works = ("--ranks N", "[training] global_batch_size = 256")
            raise refuse(Format.TORCHTITAN, "global_batch_size", "derives it from the ranks; give one of them", works)
        keys["batch.global"] = flat.get("training.local_batch_size", 1) * keys["mesh.dp"] * keys["mesh.ep"]
    _read_pipeline(flat, keys)
    if name := flat.get("optimizer.name"):
        keys["optimizer.kind"] = str(name).lower()
    keys["optimizer.betas"] = [flat.get("optimizer.beta1", 0.9), flat.get("optimizer.beta2", 0.95)]
    keys["optimizer.schedule"] = flat.get("lr_scheduler.decay_type", "linear")
    if "optimizer.lr" in flat:
        least = {"optimizer.lr": flat["optimizer.lr"], _FACTOR: flat.get(_FACTOR, 0.0)}
        peak, factor = (number(Format.TORCHTITAN, path, value) for path, value in least.items())
        keys["optimizer.min_learning_rate"] = peak * factor
    keys["precision.compute"] = flat.get("training.mixed_precision_param", "bfloat16")
    keys["precision.reduce"] = flat.get("training.mixed_precision_reduce", "float32")
    if flat.get("training.enable_cpu_offload"):
        keys["parallel.offload"] = "params"
        notes.append("enable_cpu_offload moves parameters, gradients and optimizer state; ours moves parameters")
    if not (flat.get("checkpoint.enable", False) or flat.get("checkpoint.enable_checkpoint", False)):
        keys.pop("checkpoint.every", None)
    return Reading(keys, (*notes, *unread(set(flat) - set(_SAME) - set(_DEGREES) - set(_WHOLE) - _ELSE)))


def _read_model(flat: dict[str, Any], keys: Keys, notes: list[str]) -> None:
    if "model.name" not in flat:
        return
    name = str(flat["model.name"]), str(flat.get("model.flavor", ""))
    if name in _FLAVORS:
        keys["model.preset"] = _FLAVORS[name]
    else:
        notes.append(f"model {name[0]} {name[1]} is no known flavor: give model.preset or model.hf")


def _read_mesh(flat: dict[str, Any], keys: Keys, ranks: int | None) -> None:
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


def _read_pipeline(flat: dict[str, Any], keys: Keys) -> None:
    pp = keys["mesh.pp"]
    policy = flat.get("parallelism.fsdp_reshard_after_forward", "default")
    keys["parallel.reshard_after_forward"] = policy == "always" or (policy == "default" and pp == 1)
    local = flat.get("training.local_batch_size", 1)
    keys["batch.micro"] = flat.get("parallelism.pipeline_parallel_microbatch_size", 1) if pp > 1 else local
    if pp == 1:
        return
    name = flat.get("parallelism.pipeline_parallel_schedule", "1F1B")
    ours = {theirs: schedule for schedule, theirs in _SCHEDULES.items()}
    if name not in ours:
        raise refuse(Format.TORCHTITAN, f'pipeline_parallel_schedule = "{name}"', "has it, ours has not", tuple(ours))
    keys["parallel.schedule"] = ours[name]
    per = flat.get("parallelism.pipeline_parallel_layers_per_stage")
    if ours[name] in ("interleaved", "zb-v"):
        keys["parallel.chunks"] = 2
        if per and ours[name] == "interleaved" and "model.preset" in keys:
            stages = -(-(preset(keys["model.preset"]).layers + _OUTER) // per)
            keys["parallel.chunks"] = max(stages // pp, 2)


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
    shards = source.shard_degree(Format.TORCHTITAN)
    put("parallelism.data_parallel_shard_degree", shards)
    put("parallelism.data_parallel_replicate_degree", at["dp"] * at["ep"] // shards)
    put("parallelism.fsdp_reshard_after_forward", "always" if run.parallel.reshard_after_forward else "never")
    if at["pp"] > 1:
        put("parallelism.pipeline_parallel_schedule", _SCHEDULES.get(run.parallel.schedule.value, "?"))
        put("parallelism.pipeline_parallel_microbatch_size", run.batch.micro)
        if run.parallel.chunks > 1:
            per = -(-(source.arch.layers + _OUTER) // (at["pp"] * run.parallel.chunks))
            put("parallelism.pipeline_parallel_layers_per_stage", per)
    if run.checkpoint.every:
        put("checkpoint.enable", True)
    local = run.batch.micro * (source.accumulation if at["pp"] > 1 else 1)
    put("training.local_batch_size", local)
    given = run.precision.compute, run.precision.reduce
    for (path, dtypes), dtype in zip(_DTYPES.items(), given, strict=True):
        if dtype.value in dtypes:
            put(path, dtype.value)
    if run.parallel.offload.value == "params":
        put("training.enable_cpu_offload", True)
    put("optimizer.name", {"adamw": "AdamW"}.get(run.optimizer.kind.value, run.optimizer.kind.value))
    put("optimizer.beta1", run.optimizer.betas[0])
    put("optimizer.beta2", run.optimizer.betas[1])
    put("lr_scheduler.decay_type", run.optimizer.schedule.value)
    peak = run.optimizer.learning_rate
    put(_FACTOR, run.optimizer.min_learning_rate / peak if peak else 0.0)
    return tomli_w.dumps(tables)


def _differences(source: Source) -> list[str]:
    at, parallel = source.degrees, source.run.parallel
    out = [_LOSS]
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
