"""Many layouts of one model at once: a struct of arrays, one element a layout.

Everything is float64, flags are 0 or 1. Blocks a stage: `first`, `last` and `most` (of the stages between them) are the
blocks that the outer and the fullest inner pipeline coordinate hold, all their chunks together; `lead` and `tail` those
of the first and the last virtual stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.config.choices import Context, Offload, Recompute, Schedule
from meshwright.layout.axes import DEFAULT_ORDER, Axis
from meshwright.plan.plan import Plan
from meshwright.plan.stages import owner_of

Array = npt.NDArray[np.float64]

SCHEDULES = tuple(Schedule)
RECOMPUTES = tuple(Recompute)
CONTEXTS = tuple(Context)
OFFLOADS = tuple(Offload)


@dataclass(frozen=True)
class Layouts:
    dp: Array
    tp: Array
    pp: Array
    cp: Array
    ep: Array
    micro: Array
    sequences: Array
    zero: Array
    within: Array  # 0: shard over all replicas
    reshard: Array
    schedule: Array  # index into SCHEDULES
    chunks: Array
    recompute: Array  # index into RECOMPUTES
    sequence: Array
    asynchronous: Array
    context: Array  # index into CONTEXTS
    inner_context: Array
    offload: Array  # index into OFFLOADS
    first: Array
    most: Array
    last: Array
    inner: Array  # blocks of all stages between the outer ones
    place: Array  # pipeline coordinate of the fullest of them
    ahead: Array  # blocks of those before it
    order: tuple[Axis, ...] = DEFAULT_ORDER

    def __len__(self) -> int:
        return len(self.dp)

    @cached_property
    def accumulation(self) -> Array:
        """Micro-batches a step on each batch rank."""
        return self.sequences / (self.micro * self.dp * self.ep)

    @cached_property
    def ranks(self) -> Array:
        return self.dp * self.tp * self.pp * self.cp * self.ep

    @cached_property
    def head_first(self) -> npt.NDArray[np.bool_]:
        """Whether the first pipeline coordinate holds the head too: the only one, or where a V leads back to it."""
        return np.asarray((self.pp == 1) | (self.schedule == SCHEDULES.index(Schedule.ZB_V)))

    def degree(self, axis: Axis) -> Array:
        value: Array = getattr(self, axis.value)
        return value

    def stride(self, axis: Axis) -> Array:
        """How far apart in rank two neighbours on `axis` are."""
        out = np.ones_like(self.dp)
        for inner in self.order[self.order.index(axis) + 1 :]:
            out = out * self.degree(inner)
        return out

    def part(self, index: slice | npt.NDArray[Any]) -> Layouts:
        """Some of the layouts."""
        return Layouts(**{name: getattr(self, name)[index] for name in _ARRAYS}, order=self.order)


CUT = ("first", "most", "last", "place", "ahead")
_ARRAYS = tuple(field.name for field in dataclasses.fields(Layouts) if field.name != "order")
_DEFAULTS: Mapping[str, float] = dict.fromkeys(_ARRAYS, 1.0) | {
    "zero": 0.0, "within": 0.0, "schedule": float(SCHEDULES.index(Schedule.ONE_F_ONE_B)), "recompute": 0.0,
    "sequence": 0.0, "asynchronous": 0.0, "context": 0.0, "offload": 0.0, "ahead": 0.0,
}  # fmt: skip


def layouts(num_blocks: int, order: tuple[Axis, ...] = DEFAULT_ORDER, **columns: npt.ArrayLike) -> Layouts:
    """Layouts from columns (numbers or arrays, broadcast); without `first`, `most` and `last` stages are even.

    Even: as many blocks a virtual stage; where that does not divide, the outer ones give their embedding and head the
    place of a block each; where that does not either, the fullest stage holds one more than its share.
    """
    unknown = set(columns) - set(_ARRAYS)
    if unknown:
        raise TypeError(f"no such columns: {', '.join(sorted(unknown))}")
    given = {name: np.asarray(value, dtype=np.float64) for name, value in columns.items()}
    size = np.broadcast_shapes((1,), *(value.shape for value in given.values()))
    full = {name: np.broadcast_to(given.get(name, np.float64(_DEFAULTS[name])), size).copy() for name in _ARRAYS}
    if "first" not in given:
        full["first"], full["most"], full["last"] = even_stages(num_blocks, full["pp"], full["chunks"])
    full["inner"] = np.where(full["pp"] > 1, num_blocks - full["first"] - full["last"], 0.0)
    return Layouts(**full, order=order)


def even_stages(num_blocks: int, pp: Array, chunks: Array) -> tuple[Array, Array, Array]:
    """Blocks of the first, the fullest inner and the last pipeline coordinate."""
    parts = pp * chunks
    even = num_blocks % parts == 0
    outer = ~even & ((num_blocks + 2) % parts == 0) & (pp > 1)
    share = np.where(even, num_blocks / parts, np.where(outer, (num_blocks + 2) / parts, np.ceil(num_blocks / parts)))
    most = share * chunks
    edge = np.where(outer, most - 1, most)
    # Where nothing divides the last stage takes what is left of a cut that fills the others first.
    left = np.maximum(num_blocks - (pp - 1) * most, np.floor(num_blocks / parts) * chunks)
    last = np.where(even | outer, edge, np.minimum(left, most))
    alone = pp == 1
    return np.where(alone, num_blocks, edge), np.where(pp > 2, most, 0.0), np.where(alone, num_blocks, last)


def of_plan(plan: Plan) -> Layouts:
    """The one layout of a plan."""
    held = held_blocks(plan.pipeline.stages, plan.degrees.pp, plan.pipeline.schedule)
    return layouts(
        plan.arch.layers,
        plan.degrees.order,
        **{axis.value: plan.degrees.on(axis) for axis in Axis},
        micro=plan.batch.micro,
        sequences=plan.batch.sequences,
        zero=plan.sharding.stage,
        within=plan.sharding.within,
        reshard=plan.sharding.reshard_after_forward,
        schedule=SCHEDULES.index(plan.pipeline.schedule),
        chunks=plan.pipeline.chunks,
        recompute=RECOMPUTES.index(plan.execution.recompute),
        sequence=plan.execution.sequence,
        asynchronous=plan.execution.asynchronous_tensor,
        context=CONTEXTS.index(plan.context.kind),
        inner_context=plan.context.inner,
        offload=OFFLOADS.index(plan.execution.offload),
        **dict(zip(CUT, outline(held), strict=True)),
    )


def held_blocks(stages: Sequence[int], pp: int, schedule: Schedule) -> list[int]:
    """Blocks of each pipeline coordinate, of those of each virtual stage."""
    held = [0] * pp
    for virtual, blocks in enumerate(stages):
        held[owner_of(schedule, pp, virtual)[0]] += blocks
    return held


def outline(held: Sequence[int]) -> tuple[int, int, int, int, int]:
    """Blocks of the first, the fullest inner and the last pipeline coordinate; which that inner one is, and the inner
    blocks before it: of equally full ones the one that 1F1B is longest through (a backward as long as two forwards)."""
    last = len(held) - 1
    most = max(held[1:-1], default=0)
    if not most:
        return held[0], most, held[-1], 1, 0

    def work(place: int) -> int:
        behind, after = 3 * sum(held[place + 1 :]), last - place
        waits = max(behind - after * most, 0) + max(behind - 2 * after * most, 0)
        return 3 * sum(held[:place]) + waits

    place = max((each for each in range(1, last) if held[each] == most), key=work)
    return held[0], most, held[-1], place, sum(held[1:place])
