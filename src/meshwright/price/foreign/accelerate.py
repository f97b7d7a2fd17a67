"""Accelerate YAML (1.12): how processes are started and wrapped. Model, data and optimizer live in the script there.

dp_replicate x dp_shard x tp x cp (or sp) = num_processes; cp is a ring or a gather, sp is Ulysses
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshwright.price.foreign.dialect import (
    Dialect,
    Format,
    Keys,
    Reading,
    Source,
    check_spoken,
    refuse,
    table,
    unread,
    whole,
)

__all__ = ["DIALECT"]

_LOSS = "loss: each micro-batch's mean counts alike unless the script passes token counts; ours divides by tokens"
_SCRIPTS = "batch sizes, model and optimizer are the script's there"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}
_SIZES = "parallelism_config_"
_STRATEGIES = "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"
_RESHARDS = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"
"""Keys that name a strategy, of the first FSDP and of the second, where a flag is usual."""
_KEEPING = {"SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"}  # parameters between forward and backward
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULL = "null", "~"
_READ = {"parallelism_config", "fsdp_config", "num_processes", "num_machines", "distributed_type", "mixed_precision"}
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

_DIGITS = 20  # of a size; what is longer is told as a word


def _read(text: str, _ranks: int | None = None) -> Reading:
    notes = [_LOSS]
    given = _yaml(text, notes)
    check_spoken(Format.ACCELERATE, given, _READ)
    keys: Keys = {}
    sizes = table(Format.ACCELERATE, given, "parallelism_config")
    names = {name: f"{_SIZES}{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    at = {name: whole(Format.ACCELERATE, theirs, sizes.get(theirs, 1)) for name, theirs in names.items()}
    fsdp = table(Format.ACCELERATE, given, "fsdp_config")
    processes = whole(Format.ACCELERATE, "num_processes", given.get("num_processes", 1))
    hybrid = False
    if not sizes:
        kind = _word(given.get("distributed_type", "NO"))
        known = {"FSDP": "dp_shard", "MULTI_GPU": "dp_replicate", "MULTI_CPU": "dp_replicate", "NO": "dp_replicate"}
        kind = "NO" if kind == "no" else kind
        if kind not in known:
            raise refuse(Format.ACCELERATE, f"distributed_type: {kind}", "has it, ours has not", tuple(known))
        at[known[kind]] = processes
        if kind == "FSDP":
            hybrid = _sharding(given, fsdp, at)
    if at["cp"] > 1 and at["sp"] > 1:
        raise refuse(Format.ACCELERATE, "cp_size and sp_size", "excludes one of them")
    keys["mesh.tp"], keys["mesh.cp"] = at["tp"], at["cp"] * at["sp"]
    keys["mesh.dp"] = at["dp_replicate"] * at["dp_shard"]
    keys["parallel.zero"] = 3 if at["dp_shard"] * at["cp"] > 1 else 0
    if at["dp_replicate"] > 1 and keys["parallel.zero"]:
        keys["parallel.zero_shard_within"] = at["dp_shard"] * keys["mesh.cp"]
    keys["parallel.reshard_after_forward"] = _KEEPING.isdisjoint(_strategies(fsdp))
    if hybrid:
        notes.append("HYBRID_SHARD shards within a machine there: processes / num_machines")
    keys["parallel.recompute"] = "full" if _flag(fsdp, "fsdp_activation_checkpointing") else "none"
    keys["parallel.offload"] = "params" if _flag(fsdp, "fsdp_offload_params") else "none"
    if at["sp"] > 1:
        keys["parallel.context"] = "ulysses"
    elif at["cp"] > 1:
        rotate = sizes.get(f"{_SIZES}cp_comm_strategy", "allgather")
        keys["parallel.context"] = "allgather" if rotate == "allgather" else "ring"
    mixed = _word(given.get("mixed_precision", "no"))
    if mixed not in _DTYPES:
        raise refuse(Format.ACCELERATE, f"mixed_precision: {mixed}", "has it, ours does not run it", tuple(_DTYPES))
    keys["precision.compute"] = _DTYPES[mixed]
    notes.append(f"{_SCRIPTS}: batch.*, model.* and optimizer.* stay")
    left = [*(set(given) - _READ - _HOST), *(f"fsdp_config.{name}" for name in set(fsdp) - _READ_FSDP - _HOST_FSDP)]
    return Reading(keys, (*notes, *unread([*left, *(set(sizes) - _READ_SIZES)])))


def _word(value: Any) -> str:
    """A word as it was meant: an unquoted `no` is a boolean in YAML."""
    return "no" if value is False else str(value)


def _flag(fsdp: Mapping[str, Any], name: str) -> bool:
    """A boolean, quoted or not; False where it is not given. Raises RequestError."""
    value, flags = str(fsdp.get(name, False)).lower(), {**_FLAGS, "1": True, "0": False}
    if value not in flags:
        raise refuse(Format.ACCELERATE, f"{name}: {fsdp[name]}", "wants true or false there", ("true", "false"))
    return flags[value]


def _strategies(fsdp: Mapping[str, Any]) -> list[str]:
    """The sharding by name, as each key tells it: by name or number, or, by the key of the second FSDP, as a flag.
    The first counts, but parameters are kept where one of them says so. Raises RequestError."""
    named = {str(number): name for number, name in enumerate(_STRATEGIES, 1)}
    flags = {word: _STRATEGIES[0 if flag else 1] for word, flag in {**_FLAGS, "0": False}.items()}
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
    sharded, shards = parallel.zero == 3, source.shard_degree(Format.ACCELERATE)
    sizes: dict[str, Any] = {"dp_replicate": at["dp"] // shards, "dp_shard": shards, "tp": at["tp"]}
    ulysses = parallel.context.value == "ulysses"
    if at["cp"] > 1:
        sizes["sp" if ulysses else "cp"] = at["cp"]
    config = {f"{_SIZES}{name}_size": size for name, size in sizes.items()}
    if at["cp"] > 1 and not ulysses:
        config[f"{_SIZES}cp_comm_strategy"] = "allgather" if parallel.context.value == "allgather" else "alltoall"
    precision = {ours: theirs for theirs, ours in _DTYPES.items()}.get(source.run.precision.compute.value, "?")
    tables: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP" if sharded else "MULTI_GPU",
        "mixed_precision": precision, "num_machines": 1, "machine_rank": 0, "num_processes": source.ranks,
    }  # fmt: skip
    if sharded:
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


def _yaml(text: str, notes: list[str]) -> dict[str, Any]:
    """Nested mappings of plain scalars and of lists of them: what such files hold. Of a name given twice the last
    counts, as there."""
    root: dict[str, Any] = {}
    stack: list[tuple[int, dict[str, Any]]] = [(-1, root)]
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.split(" #")[0].rstrip()
        if "\t" in bare:
            raise refuse(Format.ACCELERATE, f"line {number}: {bare.strip()}", "files are indented with spaces")
        if not bare.strip() or bare.lstrip().startswith(("#", "---")):
            continue
        depth = len(bare) - len(bare.lstrip())
        if bare.strip().startswith("- ") and len(stack) > 1:  # an item of the list that stands above, indented or not
            continue
        name, colon, value = bare.strip().partition(":")
        if not colon:
            raise refuse(Format.ACCELERATE, f"line {number}: {bare.strip()}", "files hold `name: value` lines")
        while stack[-1][0] >= depth:
            stack.pop()
        if name in stack[-1][1]:
            notes.append(f"line {number}: {name} is given twice; the last counts")
        word = value.strip()
        if word in ("", "{}"):
            child: dict[str, Any] = {}
            stack[-1][1][name] = child
            stack.append((depth, child))
        elif word.lower() in _NULL:
            stack[-1][1].pop(name, None)
        elif word[0] == "[" and word[-1] == "]":
            stack[-1][1][name] = [_scalar(each.strip()) for each in word[1:-1].split(",") if each.strip()]
        elif word[0] in "[{&*|>":
            raise refuse(Format.ACCELERATE, f"line {number}: {bare.strip()}", "files hold `name: value` lines")
        else:
            stack[-1][1][name] = _scalar(word)
    return _filled(root)


def _filled(tables: dict[str, Any]) -> dict[str, Any]:
    """Without names that have nothing under them, which is null too, in the file and in its tables."""
    inner = {
        name: {key: each for key, each in value.items() if each != {}} if isinstance(value, dict) else value
        for name, value in tables.items()
    }
    return {name: value for name, value in inner.items() if value != {}}


def _scalar(word: str) -> Any:
    """A number, quoted or not; a boolean, unquoted alone; or the word."""
    bare = word.strip("'\"")
    if bare == word and word.lower() in _FLAGS:
        return _FLAGS[word.lower()]
    return int(bare) if bare.lstrip("-").isdecimal() and len(bare) < _DIGITS else bare


def _differences(source: Source) -> list[str]:
    out = [_LOSS, _SCRIPTS]
    if source.run.parallel.zero == 3 and source.degrees["cp"] > 1:
        out.append("FSDP shards over dp_shard x cp there, as ours over dp x cp")
    return out


DIALECT = Dialect(_read, _write, _differences, frozenset({"mesh", "parallel", "precision"}))
