"""Which units every virtual stage runs, and which rank of the pipeline runs it.

interleaved, pp = 2, chunks = 2                 zb-v, pp = 2 (a V)

stage 0   virtual 0   virtual 2                 stage 0   virtual 0   virtual 3
stage 1   virtual 1   virtual 3                 stage 1   virtual 1   virtual 2
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from meshwright.config.choices import Schedule
from meshwright.plan.plan import Plan


def balanced(costs: Sequence[float], first: float, last: float, parts: int) -> tuple[int, ...]:
    """Cut blocks of the given costs into `parts` runs so that the dearest run is as cheap as possible.

    `first` and `last` are what the embedding and the head add to the outer runs. Dynamic programming over prefixes;
    among equally dear cuts the earlier stages take more blocks. Each run holds at least one block where there are
    enough blocks.
    """
    blocks = len(costs)
    least = 1 if blocks >= parts else 0
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    def run(start: int, stop: int, part: int) -> float:
        return prefix[stop] - prefix[start] + (first if part == 0 else 0.0) + (last if part == parts - 1 else 0.0)

    best = [[float("inf")] * (blocks + 1) for _ in range(parts + 1)]
    cut = [[0] * (blocks + 1) for _ in range(parts + 1)]
    best[parts][blocks] = 0.0
    for part in reversed(range(parts)):
        for start in range(blocks + 1):
            for stop in range(start + least, blocks + 1):
                worst = max(run(start, stop, part), best[part + 1][stop])
                if worst <= best[part][start]:
                    best[part][start], cut[part][start] = worst, stop
    counts, start = [], 0
    for part in range(parts):
        counts.append(cut[part][start] - start)
        start = cut[part][start]
    return tuple(counts)


@lru_cache(maxsize=64)
def virtual_stages(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The units of each virtual stage in order of execution: the embedding leads the first, the head ends the last."""
    stages, unit = [], 1
    for blocks in plan.pipeline.stages:
        stages.append(tuple(range(unit, unit + blocks)))
        unit += blocks
    stages[0] = (0, *stages[0])
    stages[-1] = (*stages[-1], plan.arch.head_unit)
    return tuple(stages)


def place(plan: Plan, virtual: int) -> tuple[int, int]:
    """(pipeline coordinate, chunk) of a virtual stage."""
    ways = plan.degrees.pp
    chunk, stage = divmod(virtual, ways)
    if plan.pipeline.schedule is Schedule.ZB_V and chunk == 1:
        stage = ways - 1 - stage
    return stage, chunk


def virtual_of(plan: Plan, stage: int, chunk: int) -> int:
    """The inverse of `place`."""
    ways = plan.degrees.pp
    mirrored = plan.pipeline.schedule is Schedule.ZB_V and chunk == 1
    return chunk * ways + (ways - 1 - stage if mirrored else stage)


@lru_cache(maxsize=1024)
def stage_units(plan: Plan, stage: int) -> tuple[int, ...]:
    """All units on one pipeline coordinate, chunk by chunk."""
    virtual = virtual_stages(plan)
    return tuple(unit for chunk in range(plan.pipeline.chunks) for unit in virtual[virtual_of(plan, stage, chunk)])


@lru_cache(maxsize=64)
def stage_of_unit(plan: Plan) -> tuple[int, ...]:
    """The pipeline coordinate of every unit."""
    owner = [0] * plan.arch.num_units
    for virtual, units in enumerate(virtual_stages(plan)):
        for unit in units:
            owner[unit] = place(plan, virtual)[0]
    return tuple(owner)
