"""Stages of torchtitan: cut evenly, the embedding and the head counted as a layer each, or by the modules of each.

34 = 32 layers + 2 on 4 stages      9 9 8 8 with them, so 8 9 8 7 layers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.arch.catalogue import preset
from meshwright.price.foreign.dialect import Format, Keys, Source, refuse, whole

__all__ = ["FREED", "PARTS", "SCHEDULES", "put_stages", "read_pipeline"]

PARTS = "parallelism.module_fqns_per_model_part"
_OUTER = 2  # embedding and head count as a block each there
_REFUSED = "parallelism.pipeline_parallel_split_points", "parallelism.pipeline_parallel_schedule_csv"
FREED = "parallelism.pipeline_parallel_first_stage_less_layers", "parallelism.pipeline_parallel_last_stage_less_layers"
SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}


def read_pipeline(flat: Mapping[str, Any], keys: Keys) -> None:
    """Add micro-batch, schedule and stages to the keys of a job. Raises RequestError."""
    pp = keys["mesh.pp"]
    policy = flat.get("parallelism.fsdp_reshard_after_forward", "default")
    keys["parallel.reshard_after_forward"] = policy == "always" or (policy == "default" and pp == 1)
    local = whole(Format.TORCHTITAN, "training.local_batch_size", flat["training.local_batch_size"])
    keys["batch.micro"] = local
    if pp == 1:
        return
    for path in _REFUSED:
        if flat.get(path):
            raise refuse(Format.TORCHTITAN, path, "cuts stages by it, ours by numbers of blocks", (PARTS,))
    keys["batch.micro"] = flat.get("parallelism.pipeline_parallel_microbatch_size", 1)
    if "parallelism.pipeline_parallel_microbatches" in flat:  # their number, in older releases
        path = "parallelism.pipeline_parallel_microbatches"
        keys["batch.micro"] = max(local // whole(Format.TORCHTITAN, path, flat[path]), 1)
    name = flat.get("parallelism.pipeline_parallel_schedule", "1F1B")
    ours = {theirs.lower(): schedule for schedule, theirs in SCHEDULES.items()}
    if str(name).lower() not in ours:
        works = tuple(SCHEDULES.values())
        raise refuse(Format.TORCHTITAN, f'pipeline_parallel_schedule = "{name}"', "has it, ours has not", works)
    keys["parallel.schedule"] = ours[str(name).lower()]
    _read_stages(flat, keys)


def _read_stages(flat: Mapping[str, Any], keys: Keys) -> None:
    """Chunks and blocks of each stage, where the file or the model says them."""
    pp, looped = keys["mesh.pp"], keys["parallel.schedule"] in ("interleaved", "zb-v")
    stages = pp * 2 if looped else pp
    layers = preset(keys["model.preset"]).layers if "model.preset" in keys else 0
    weights = [flat.get(path, 1) for path in FREED]
    for path, weight in zip(FREED, weights, strict=True):
        whole(Format.TORCHTITAN, path, weight, 0)
    if parts := flat.get(PARTS):
        if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
            raise refuse(Format.TORCHTITAN, f"{PARTS} = {parts}", "wants a list of lists of modules")
        counts = [sum(str(name).startswith("layers.") for name in part) for part in parts]
        if len(counts) % pp or min(counts, default=0) < 1:
            raise refuse(Format.TORCHTITAN, PARTS, f"wants parts with layers, a multiple of {pp} of them")
        keys["parallel.stages"], stages = counts, len(counts)
    elif (per := flat.get("parallelism.pipeline_parallel_layers_per_stage")) and layers:
        stages = -(-(layers + sum(weights)) // per)
        if stages % pp:
            path = f"pipeline_parallel_layers_per_stage = {per}"
            raise refuse(Format.TORCHTITAN, path, f"makes {stages} stages of it, no multiple of {pp} ranks")
    if looped:
        keys["parallel.chunks"] = stages // pp
    if layers and "parallel.stages" not in keys:
        keys["parallel.stages"] = _even(layers, stages, *weights)


def _even(layers: int, stages: int, first: int = 1, last: int = 1) -> list[int]:
    """Blocks of each stage where the embedding counts as `first` blocks and the head as `last`."""
    if stages > layers + first + last:
        raise refuse(Format.TORCHTITAN, f"{stages} stages", f"has no block for each: the model has {layers}")
    each, more = divmod(layers + first + last, stages)
    out = [each + (stage < more) for stage in range(stages)]
    out[0], out[-1] = out[0] - first, out[-1] - last
    if min(out) < 1:
        raise refuse(Format.TORCHTITAN, f"{stages} stages", f"has no block for each: the model has {layers}")
    return out


def put_stages(source: Source, put: Callable[[str, Any], None]) -> None:
    """The number of layers a stage where that cuts the same stages there, else the modules of each."""
    layers, count = source.arch.layers, len(source.stages)
    per = -(-(layers + _OUTER) // count)
    if layers + _OUTER >= 2 * count and tuple(_even(layers, count)) == source.stages:
        if source.run.parallel.chunks > 1:
            put("parallelism.pipeline_parallel_layers_per_stage", per)
        return
    names = iter(range(layers))
    parts = [[f"layers.{next(names)}" for _ in range(blocks)] for blocks in source.stages]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    put(PARTS, parts)
