"""Which units every virtual stage runs, and which rank of the pipeline runs it.

interleaved, pp = 2, chunks = 2                 zb-v, pp = 2 (a V)

stage 0   virtual 0   virtual 2                 stage 0   virtual 0   virtual 3
stage 1   virtual 1   virtual 3                 stage 1   virtual 1   virtual 2
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from meshwright.config.choices import Schedule
from meshwright.plan.plan import Plan


def balanced(
    costs: Sequence[float], first: float, last: float, parts: int, owners: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Cut blocks of the given costs into `parts` runs so that the dearest run is as cheap as possible.

    `first` and `last` are what the embedding and the head add to the outer runs. Dynamic programming over prefixes;
    among equally dear cuts the earlier stages take more blocks. Each run holds at least one block where there are
    enough blocks. `owners` tells which stage each run belongs to: where a stage has several, blocks are then moved
    between runs for as long as this makes the dearest stage cheaper.
    """
    runs = _Runs(costs, first, last, parts)
    counts = _dearest_run_cheapest(runs)
    if owners is not None and len(set(owners)) < parts:
        counts = _dearest_stage_cheaper(runs, counts, owners)
    return counts


class _Runs:
    """The cost of every run of blocks, by prefix sums."""

    def __init__(self, costs: Sequence[float], first: float, last: float, parts: int) -> None:
        self.blocks, self.parts, self.least = len(costs), parts, 1 if len(costs) >= parts else 0
        self._outer = first, last
        self._prefix = [0.0, *accumulate(costs)]

    def cost(self, start: int, stop: int, part: int) -> float:
        first, last = self._outer
        ends = (first if part == 0 else 0.0) + (last if part == self.parts - 1 else 0.0)
        return self._prefix[stop] - self._prefix[start] + ends

    def of(self, counts: Sequence[int]) -> list[float]:
        edges = [0, *accumulate(counts)]
        return [self.cost(start, stop, part) for part, (start, stop) in enumerate(pairwise(edges))]


def _dearest_run_cheapest(runs: _Runs) -> tuple[int, ...]:
    blocks, parts = runs.blocks, runs.parts
    best = [[float("inf")] * (blocks + 1) for _ in range(parts + 1)]
    cut = [[0] * (blocks + 1) for _ in range(parts + 1)]
    best[parts][blocks] = 0.0
    for part in reversed(range(parts)):
        for start in range(blocks + 1):
            for stop in range(start + runs.least, blocks + 1):
                worst = max(runs.cost(start, stop, part), best[part + 1][stop])
                if worst <= best[part][start]:
                    best[part][start], cut[part][start] = worst, stop
    counts, start = [], 0
    for part in range(parts):
        counts.append(cut[part][start] - start)
        start = cut[part][start]
    return tuple(counts)


def _dearest_stage_cheaper(runs: _Runs, counts: tuple[int, ...], owners: Sequence[int]) -> tuple[int, ...]:
    """Take blocks from the runs of the dearest stage, one at a time, until no move helps."""

    def judged(each: tuple[int, ...]) -> tuple[list[float], list[float]]:
        stages = dict.fromkeys(owners, 0.0)
        costs = runs.of(each)
        for owner, cost in zip(owners, costs, strict=True):
            stages[owner] += cost
        return sorted(stages.values(), reverse=True), sorted(costs, reverse=True)

    best = judged(counts)
    while True:
        moves = [
            tuple(count - (part == source) + (part == target) for part, count in enumerate(counts))
            for source in range(runs.parts)
            for target in range(runs.parts)
            if source != target and counts[source] > runs.least
        ]
        better = min(moves, key=judged, default=counts)
        if judged(better) >= best:
            return counts
        counts, best = better, judged(better)


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


def owner_of(schedule: Schedule, ways: int, virtual: int) -> tuple[int, int]:
    """(pipeline coordinate, chunk) of a virtual stage on `ways` stages: round and round, or there and back."""
    chunk, stage = divmod(virtual, ways)
    if schedule is Schedule.ZB_V and chunk == 1:
        stage = ways - 1 - stage
    return stage, chunk


def place(plan: Plan, virtual: int) -> tuple[int, int]:
    """(pipeline coordinate, chunk) of a virtual stage."""
    return owner_of(plan.pipeline.schedule, plan.degrees.pp, virtual)


def virtual_of(plan: Plan, stage: int, chunk: int) -> int:
    """The inverse of `place`: either way round is its own inverse."""
    ways = plan.degrees.pp
    return chunk * ways + owner_of(plan.pipeline.schedule, ways, chunk * ways + stage)[0]


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
