"""Accelerate YAML (1.12): how processes are started and wrapped. Model, data and optimizer live in the script there.

dp_replicate x dp_shard x tp x cp (or sp) = num_processes; cp is a ring or a gather, sp is Ulysses
"""

from __future__ import annotations

import json
from typing import Any

from meshwright.price.foreign.dialect import Dialect, Format, Keys, Reading, Source, refuse, table, whole

__all__ = ["DIALECT"]

_LOSS = "loss: each micro-batch's mean counts alike unless the script passes token counts; ours divides by tokens"
_SIZES = "parallelism_config_"
_DIGITS = 20  # of a size; what is longer is told as a word


def _read(text: str) -> Reading:
    notes = [_LOSS]
    given = _yaml(text, notes)
    keys: Keys = {}
    sizes = table(Format.ACCELERATE, given, "parallelism_config")
    names = {name: f"{_SIZES}{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    at = {name: whole(Format.ACCELERATE, theirs, sizes.get(theirs, 1)) for name, theirs in names.items()}
    fsdp = table(Format.ACCELERATE, given, "fsdp_config")
    processes = whole(Format.ACCELERATE, "num_processes", given.get("num_processes", 1))
    if not sizes:
        kind = str(given.get("distributed_type", "NO"))
        known = {"FSDP": "dp_shard", "MULTI_GPU": "dp_replicate", "MULTI_CPU": "dp_replicate", "NO": "dp_replicate"}
        if kind not in known:
            raise refuse(Format.ACCELERATE, f"distributed_type: {kind}", "has it, ours has not", tuple(known))
        at[known[kind]] = processes
    if at["cp"] > 1 and at["sp"] > 1:
        raise refuse(Format.ACCELERATE, "cp_size and sp_size", "excludes one of them")
    keys["mesh.tp"], keys["mesh.cp"] = at["tp"], at["cp"] * at["sp"]
    keys["mesh.dp"] = at["dp_replicate"] * at["dp_shard"]
    keys["parallel.zero"] = 3 if at["dp_shard"] * at["cp"] > 1 else 0
    if at["dp_replicate"] > 1 and keys["parallel.zero"]:
        keys["parallel.zero_shard_within"] = at["dp_shard"] * keys["mesh.cp"]
    keys["parallel.reshard_after_forward"] = str(fsdp.get("fsdp_reshard_after_forward", True)) not in (
        "False",
        "SHARD_GRAD_OP",
    )
    keys["parallel.recompute"] = "full" if fsdp.get("fsdp_activation_checkpointing") else "none"
    keys["parallel.offload"] = "params" if fsdp.get("fsdp_offload_params") else "none"
    if at["sp"] > 1:
        keys["parallel.context"] = "ulysses"
    elif at["cp"] > 1:
        rotate = sizes.get(f"{_SIZES}cp_comm_strategy", "allgather")
        keys["parallel.context"] = "allgather" if rotate == "allgather" else "ring"
    precision = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}.get(str(given.get("mixed_precision", "no")))
    if precision is None:
        raise refuse(Format.ACCELERATE, f"mixed_precision: {given['mixed_precision']}", "has it, ours does not run it")
    keys["precision.compute"] = precision
    notes.append("batch sizes, model and optimizer are the script's there: batch.*, model.* and optimizer.* stay")
    return Reading(keys, tuple(notes))


def _write(source: Source) -> str:
    parallel, at = source.run.parallel, source.degrees
    sharded = parallel.zero == 3
    shards = (parallel.zero_shard_within or source.replicas) // at["cp"]
    sizes: dict[str, Any] = {
        "dp_replicate": at["dp"] // shards if sharded else at["dp"], "dp_shard": shards if sharded else 1,
        "tp": at["tp"],
    }  # fmt: skip
    ulysses = parallel.context.value == "ulysses"
    if at["cp"] > 1:
        sizes["sp" if ulysses else "cp"] = at["cp"]
    config = {f"{_SIZES}{name}_size": size for name, size in sizes.items()}
    if at["cp"] > 1 and not ulysses:
        config[f"{_SIZES}cp_comm_strategy"] = "allgather" if parallel.context.value == "allgather" else "alltoall"
    precision = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}.get(source.run.precision.compute.value, "?")
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
    """Nested mappings of plain scalars: what such files hold. Of a name given twice the last counts, as there."""
    root: dict[str, Any] = {}
    stack: list[tuple[int, dict[str, Any]]] = [(-1, root)]
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.split(" #")[0].rstrip()
        if "\t" in bare:
            raise refuse(Format.ACCELERATE, f"line {number}: {bare.strip()}", "files are indented with spaces")
        if not bare.strip() or bare.lstrip().startswith(("#", "---")):
            continue
        depth = len(bare) - len(bare.lstrip())
        name, colon, value = bare.strip().partition(":")
        if not colon:
            raise refuse(Format.ACCELERATE, f"line {number}: {bare.strip()}", "files hold `name: value` lines")
        while stack[-1][0] >= depth:
            stack.pop()
        if name in stack[-1][1]:
            notes.append(f"line {number}: {name} is given twice; the last counts")
        if value.strip() in ("", "{}"):
            child: dict[str, Any] = {}
            stack[-1][1][name] = child
            stack.append((depth, child))
        else:
            if value.strip()[0] in "[{&*|>":
                raise refuse(Format.ACCELERATE, f"line {number}: {bare.strip()}", "files hold `name: value` lines")
            stack[-1][1][name] = _scalar(value.strip())
    return root


def _scalar(word: str) -> Any:
    word = word.strip("'\"")
    if word in ("true", "True", "yes"):
        return True
    if word in ("false", "False"):
        return False
    return int(word) if word.lstrip("-").isdecimal() and len(word) < _DIGITS else word


def _differences(source: Source) -> list[str]:
    out = [_LOSS, "batch sizes, model and optimizer are the script's there"]
    if source.run.parallel.zero == 3 and source.degrees["cp"] > 1:
        out.append("FSDP shards over dp_shard x cp there, as ours over dp x cp")
    return out


DIALECT = Dialect(_read, _write, _differences, frozenset({"mesh", "parallel", "precision"}))
