"""Accelerate YAML (1.12): how processes are started and wrapped. Model, data and optimizer live in the script there.

dp_replicate x dp_shard x tp x cp (or sp) = num_processes; cp is a ring or a gather, sp is Ulysses
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from meshwright.config.errors import RequestError
from meshwright.price.foreign.accelerate_plugins import PLUGINS, flag
from meshwright.price.foreign.dialect import (
    Dialect,
    Format,
    Keys,
    Reading,
    Source,
    check_spoken,
    refuse,
    sharded,
    table,
    unread,
    whole,
)
from meshwright.price.foreign.yaml import FLAGS, mapping

__all__ = ["DIALECT"]

_LOSS = "loss: each micro-batch's mean counts alike unless the script passes token counts; ours divides by tokens"
_SIZES = "parallelism_config_"
_STRATEGIES = "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"
_RESHARDS = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"
"""Keys that name a strategy, of the first FSDP and of the second, where a flag is usual."""
_KEEPING = {"SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"}  # parameters between forward and backward
_KINDS = {"FSDP": "dp_shard", **dict.fromkeys(
    ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "NO"),
    "dp_replicate")}  # fmt: skip
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8", "no": "float32"}
_READ = {
    "deepspeed_config",
    "megatron_lm_config",
    "parallelism_config",
    "fsdp_config",
    "num_processes",
    "num_machines",
    "distributed_type",
    "mixed_precision",
}
_READ_FSDP = {*_RESHARDS, "fsdp_activation_checkpointing", "fsdp_offload_params"}
_READ_SIZES = {f"{_SIZES}{name}" for name in (
    "dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "cp_comm_strategy")}  # fmt: skip
_HOST = {"compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "machine_rank", "main_process_ip",
         "main_process_port", "main_training_function", "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster",
         "tpu_use_sudo", "use_cpu", "gpu_ids", "tpu_name", "tpu_zone", "commands", "command_file"}  # fmt: skip
_HOST_FSDP = {"fsdp_version", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_state_dict_type",
              "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states", "fsdp_use_orig_params",
              "fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_backward_prefetch_policy"}  # fmt: skip
"""Where and how processes start, and when FSDP sends what: no layout."""


def _read(text: str, ranks: int | None = None) -> Reading:
    notes = [_LOSS]
    given = mapping(text, notes)
    check_spoken(Format.ACCELERATE, given, ("distributed_type", "num_processes", *sorted(_READ)))
    keys: Keys = {}
    sizes = table(Format.ACCELERATE, given, "parallelism_config")
    names = {name: f"{_SIZES}{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    at = {name: whole(Format.ACCELERATE, theirs, sizes.get(theirs, 1)) for name, theirs in names.items()}
    fsdp = table(Format.ACCELERATE, given, "fsdp_config")
    processes = _processes(given, ranks)
    hybrid = False
    plugin = _word(given.get("distributed_type", "NO"))
    if plugin in PLUGINS:
        ways = at.pop("sp")
        if other := [names[name] for name, size in at.items() if size > 1]:
            raise refuse(Format.ACCELERATE, f"{other[0]} beside distributed_type: {plugin}", "has one of them")
        if processes is not None and processes % ways:
            raise refuse(Format.ACCELERATE, f"num_processes: {processes}", f"wants a multiple of {names['sp']} {ways}")
        keys |= PLUGINS[plugin](given, processes and processes // ways, notes)
        keys |= {"mesh.cp": ways, "parallel.context": "ulysses"} if ways > 1 else {}
        half = _word(given.get("mixed_precision", "no")) == "fp16" or keys["parallel.zero"] > 0
        return _finished(given, keys, notes, fsdp, sizes, reduced=plugin == "DEEPSPEED" and half)
    if sizes:
        total = math.prod(at.values())
        if processes is not None and processes != total:
            named = f"num_processes: {processes}" if "num_processes" in given else f"{processes} ranks"
            rule = f"wants the product of the sizes of parallelism_config, {total}"
            raise refuse(Format.ACCELERATE, named, rule, (f"num_processes: {total}",))
    else:
        kind = _word(given.get("distributed_type", "NO"))
        kind = "MULTI_GPU" if "distributed_type" not in given else "NO" if kind == "no" else kind
        if kind not in _KINDS:
            raise refuse(Format.ACCELERATE, f"distributed_type: {kind}", "has it, ours has not", (*_KINDS, *PLUGINS))
        if kind == "NO" and (processes or 1) > 1:
            rule = "is one process; what several are is said by distributed_type"
            raise refuse(Format.ACCELERATE, f"num_processes: {processes}", rule, ("distributed_type: MULTI_GPU",))
        if processes is None and kind == "FSDP":
            works = ("--ranks N", "num_processes: 8")
            raise refuse(Format.ACCELERATE, "num_processes", "leaves it to the launcher; give one of them", works)
        at[_KINDS[kind]] = processes or 1
        if kind == "FSDP":
            hybrid = _sharding(given, fsdp, at)
    if at["cp"] > 1 and at["sp"] > 1:
        raise refuse(Format.ACCELERATE, "cp_size and sp_size", "excludes one of them")
    keys["mesh.tp"], keys["mesh.cp"] = at["tp"], at["cp"] * at["sp"]
    if at["tp"] > 1:
        keys["parallel.sequence"] = False
    keys["mesh.dp"] = at["dp_replicate"] * at["dp_shard"]
    keys["parallel.zero"] = 3 if at["dp_shard"] * at["cp"] > 1 else 0
    if at["dp_replicate"] > 1 and keys["parallel.zero"]:
        keys["parallel.zero_shard_within"] = at["dp_shard"] * keys["mesh.cp"]
    keys["parallel.reshard_after_forward"] = _KEEPING.isdisjoint(_strategies(fsdp))
    if hybrid:
        notes.append("HYBRID_SHARD shards within a machine there: processes / num_machines")
    keys["parallel.recompute"] = "full" if flag(fsdp, "fsdp_activation_checkpointing") else "none"
    keys["parallel.offload"] = "params" if flag(fsdp, "fsdp_offload_params") else "none"
    if at["sp"] > 1:
        keys["parallel.context"] = "ulysses"
    elif at["cp"] > 1:
        rotate = sizes.get(f"{_SIZES}cp_comm_strategy", "allgather")
        keys["parallel.context"] = "allgather" if rotate == "allgather" else "ring"
    fully = _word(given.get("distributed_type", "NO")) == "FSDP"
    return _finished(given, keys, notes, fsdp, sizes, reduced=fully)


def _finished(
    given: Mapping[str, Any], keys: Keys, notes: list[str], fsdp: Mapping[str, Any], sizes: Mapping[str, Any],
    *, reduced: bool,
) -> Reading:  # fmt: skip
    """With precision, and what was left alone. `reduced`: gradients are summed in the dtype of the products."""
    mixed = _word(given.get("mixed_precision", "no"))
    if mixed not in _PRECISIONS:
        works = tuple(_PRECISIONS)
        raise refuse(Format.ACCELERATE, f"mixed_precision: {mixed}", "has it, ours does not run it", works)
    keys["precision.compute"] = _PRECISIONS[mixed]
    if mixed == "fp8":
        notes.append("mixed_precision fp8: products in 8 bits; ours prices them, it runs none")
    elif reduced and mixed != "no":
        keys.setdefault("precision.reduce", _PRECISIONS[mixed])
    notes.append("batch sizes, model and optimizer are the script's there: batch.*, model.* and optimizer.* stay")
    left = [*(set(given) - _READ - _HOST), *(f"fsdp_config.{name}" for name in set(fsdp) - _READ_FSDP - _HOST_FSDP)]
    return Reading(keys, (*notes, *unread([*left, *(set(sizes) - _READ_SIZES)])))


def _processes(given: Mapping[str, Any], ranks: int | None) -> int | None:
    """Processes by the file or by --ranks, which must agree; None where nobody says. Raises RequestError."""
    if "num_processes" not in given:
        return ranks
    processes = whole(Format.ACCELERATE, "num_processes", given["num_processes"])
    if ranks is not None and ranks != processes:
        works = (f"--ranks {processes}", "no --ranks")
        raise refuse(Format.ACCELERATE, f"num_processes: {processes}", f"contradicts --ranks {ranks}", works)
    return processes


def _word(value: Any) -> str:
    """A word as it was meant: an unquoted `no` is a boolean in YAML."""
    return "no" if value is False else str(value)


def _strategies(fsdp: Mapping[str, Any]) -> list[str]:
    """The sharding by name, as each key tells it: by name or number, or, by the key of the second FSDP, as a flag.
    The first counts, but parameters are kept where one of them says so. Raises RequestError."""
    named = {str(number): name for number, name in enumerate(_STRATEGIES, 1)}
    flags = {word: _STRATEGIES[0 if flag else 1] for word, flag in {**FLAGS, "0": False}.items()}
    out = []
    for key in _RESHARDS:
        if key in fsdp:
            told = _word(fsdp[key])
            name = flags.get(told.lower(), told) if key == _RESHARDS[1] else told
            name = named.get(name, name)
            if name not in _STRATEGIES:
                raise refuse(Format.ACCELERATE, f"{key}: {told}", "has no such strategy", _STRATEGIES)
            out.append(name)
    return out or [_STRATEGIES[0]]


def _sharding(given: Mapping[str, Any], fsdp: Mapping[str, Any], at: dict[str, int]) -> bool:
    """Take the ranks of FSDP apart into replicas and shards; whether there are both."""
    name, ranks = _strategies(fsdp)[0], at["dp_shard"]
    if name == "NO_SHARD":
        at |= {"dp_replicate": ranks, "dp_shard": 1}
    if not name.startswith("HYBRID"):
        return False
    machines = whole(Format.ACCELERATE, "num_machines", given.get("num_machines", 1))
    if ranks % machines:
        raise refuse(Format.ACCELERATE, f"num_processes: {ranks}", f"wants a multiple of num_machines {machines}")
    at |= {"dp_replicate": machines, "dp_shard": ranks // machines}
    return machines > 1


def _write(source: Source) -> str:
    parallel, at = source.run.parallel, source.degrees
    fully = parallel.zero == 3
    shards = sharded(source) if fully else 1
    sizes: dict[str, Any] = {
        "dp_replicate": at["dp"] // shards if fully else at["dp"], "dp_shard": shards if fully else 1,
        "tp": at["tp"],
    }  # fmt: skip
    ulysses = parallel.context.value == "ulysses"
    if at["cp"] > 1:
        sizes["sp" if ulysses else "cp"] = at["cp"]
    config = {f"{_SIZES}{name}_size": size for name, size in sizes.items()}
    if at["cp"] > 1 and not ulysses:
        config[f"{_SIZES}cp_comm_strategy"] = "allgather" if parallel.context.value == "allgather" else "alltoall"
    compute = source.run.precision.compute.value
    precision = {ours: theirs for theirs, ours in _PRECISIONS.items()}.get(compute)
    if precision is None:
        works = tuple(f"precision.compute={each}" for each in _PRECISIONS.values())
        raise RequestError(f'precision.compute = "{compute}"', "accelerate cannot express it", works)
    tables: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP" if fully else "MULTI_GPU",
        "mixed_precision": precision, "num_machines": 1, "machine_rank": 0, "num_processes": math.prod(sizes.values()),
    }  # fmt: skip
    if fully:
        tables["fsdp_config"] = {
            "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": parallel.reshard_after_forward,
            "fsdp_activation_checkpointing": parallel.recompute.value == "full",
            "fsdp_offload_params": parallel.offload.value == "params", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }  # fmt: skip
    tables["parallelism_config"] = config
    return "\n".join(_lines(tables, "")) + "\n"


def _lines(tables: dict[str, Any], indent: str) -> list[str]:
    out = []
    for name, value in tables.items():
        if isinstance(value, dict):
            out += [f"{indent}{name}:", *_lines(value, indent + "  ")]
        else:
            out.append(f"{indent}{name}: {json.dumps(value) if isinstance(value, bool) or value == 'no' else value}")
    return out


def _differences(source: Source) -> list[str]:
    out = [_LOSS, "batch sizes, model and optimizer are the script's there"]
    if source.degrees["tp"] > 1:
        out.append("tp: tensor ranks there never cut the sequence (no sequence parallel)")
    if source.run.parallel.zero == 3 and source.degrees["cp"] > 1:
        out.append("FSDP shards over dp_shard x cp there, as ours over dp x cp")
    return out


DIALECT = Dialect(_read, _write, _differences, frozenset({"mesh", "parallel", "precision"}), ("pp", "ep"))
