"""Activations of the literal program, in closed form, over arrays: what its units keep, counted over its schedule.

    kept of a micro-batch     graphs (full recomputation: entering values) from forward to backward
                              factors of weight products from a split backward to the weight work
    crests of a schedule      how many of both a stage has at its fullest moments, counted slot by slot

              F0  F1  F2  B0  F3  B1  W0  ...        zb-h1, stage 1 of 3
    graphs    1   2   2   1   2   1   1
    factors   0   0   0   1   1   2   1              crests: (2, 1), (1, 2)

Sizes are those of the fold (`plan/folds/memory.py`), of a mean block; exact but for when a unit passes through its
fullest moment, and without masks of documents.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import repeat
from operator import ge
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.arch.activations import Setting
from meshwright.arch.arch import Arch
from meshwright.arch.passing import Gradients, backward_passing, forward_passing, split_passing, stash_bytes
from meshwright.config.choices import Dtype, Recompute, Schedule
from meshwright.plan.category import Category
from meshwright.plan.folds.setting import crossing, narrowed
from meshwright.plan.folds.sizes import graph_sizes, rows_bytes
from meshwright.plan.plan import ContextSplit
from meshwright.plan.schedules import SCHEDULES as FUNCTIONS
from meshwright.plan.schedules import Work
from meshwright.price.layouts import CONTEXTS, RECOMPUTES, SCHEDULES, Array, Layouts
from meshwright.price.target import Target

__all__ = ["Crest", "Held", "crests", "program_activations"]

_FILLED = 3  # micro-batches a stage: more keep no more, but where all forwards come first
_MOST_CRESTS = 16


class _UnitBytes(NamedTuple):
    """Bytes of one micro-batch: graphs and factors of a block, the embedding and the head; what passes in a block and
    in the head; logits among the head's graph; what enters a block; tables and masks."""

    block: int
    embedding: int
    head: int
    block_factors: int
    embedding_factors: int
    head_factors: int
    block_passing: int
    head_passing: int
    logits: int
    entering: int
    rows: int


Held = tuple[Array, Array]
"""Bytes of activations and, apart from them, of logits."""

_DECIDE = (
    "micro", "tp", "sequence", "recompute", "schedule", "pp", "chunks", "first", "most", "last", "cp", "context",
    "inner_context",
)  # fmt: skip

Crest = tuple[int, int, int, int, int, int]
"""Graphs of all chunks of a stage together, of its first and of its last chunk; then factors likewise."""


def program_activations(target: Target, layouts: Layouts) -> tuple[Held, Held, Held]:
    """Bytes at their most on the first, the fullest inner and the last stage: (activations, logits).

    Layouts that differ only in what nothing of this depends on, as ZeRO's stage, are counted once.
    """
    columns: list[Array] = [getattr(layouts, name) for name in _DECIDE]
    _, first, which = _distinct(*columns, (layouts.ep > 1) * 1.0, _telling(layouts))
    some = layouts.part(first)
    units = _UnitBytes(*_units_of(target, some).T)
    held = (_on_stage(some, units, stage) for stage in range(3))
    one, inner, last = ((activations[which], logits[which]) for activations, logits in held)
    return one, inner, last


def _on_stage(layouts: Layouts, units: _UnitBytes, stage: int) -> Held:
    blocks = (layouts.first, layouts.most, layouts.last)[stage]
    counts = _crests_of(layouts, stage)  # 6 x layouts x crests
    full = layouts.recompute == RECOMPUTES.index(Recompute.FULL)
    has_head = np.where(layouts.head_first, stage == 0, stage == 2) * 1.0
    has_embedding = (stage == 0) * np.ones_like(blocks)
    each = blocks / layouts.chunks
    sizes = (
        each * np.where(full, units.entering, units.block), has_embedding * units.embedding, has_head * units.head,
        each * units.block_factors, has_embedding * units.embedding_factors, has_head * units.head_factors,
        units.rows * np.ones_like(blocks),
    )  # fmt: skip
    total = np.zeros(counts.shape[1:])
    alive = np.maximum(counts[1] + counts[4], counts[2] + counts[5])  # micro-batches of which something is kept
    for count, size in zip((*counts, alive), sizes, strict=True):
        total += count * size[:, None]
    passing = np.maximum(units.block_passing + full * units.block, has_head * units.head_passing)
    logits = has_head * units.logits
    return total.max(axis=1) + passing - logits + (layouts.pp > 1) * units.entering, logits


def _units_of(target: Target, layouts: Layouts) -> Array:
    """`_UnitBytes` of every layout, as rows."""
    split = np.isin(layouts.schedule, [index for index, each in enumerate(SCHEDULES) if each.is_split]) & (
        layouts.pp > 1
    )
    selective = layouts.recompute == RECOMPUTES.index(Recompute.SELECTIVE)
    kinds, _, which = _distinct(
        layouts.micro, layouts.tp, layouts.sequence, selective * 1.0, split * 1.0, layouts.cp, layouts.context,
        layouts.inner_context, (layouts.ep > 1) * 1.0,
    )  # fmt: skip
    dtype = Dtype.BFLOAT16 if target.stored == 2 else target.precision.compute
    model = target.arch, dtype, target.precision.reduce, target.sequence, target.direct
    return np.array([_unit_bytes(*model, *map(int, kind)) for kind in kinds], dtype=np.float64)[which]


def _crests_of(layouts: Layouts, stage: int) -> Array:
    """Crests of every layout, 6 x layouts x crests: as many for all, the missing ones of nothing."""
    micros = _telling(layouts)
    kinds, _, which = _distinct(layouts.schedule, layouts.pp, micros, layouts.chunks)
    table = np.zeros((6, len(kinds), _MOST_CRESTS))
    for row, (schedule, pp, count, chunks) in enumerate(kinds.astype(int)):
        place = (0, min(1, pp - 1), pp - 1)[stage]
        found = crests(SCHEDULES[schedule], int(place), int(pp), int(count), int(chunks))
        kept = found if len(found) <= _MOST_CRESTS else found[:: -(-len(found) // _MOST_CRESTS)]
        table[:, row, : len(kept)] = np.transpose(kept)
    most = max(1, int((table.sum(axis=0) > 0).sum(axis=1).max()))
    return np.asarray(table[:, :, :most][:, which])


def _telling(layouts: Layouts) -> Array:
    """Micro-batches that tell what a stage holds of all of them."""
    every = layouts.schedule == SCHEDULES.index(Schedule.GPIPE)
    few = np.minimum(layouts.accumulation, _FILLED * layouts.pp)
    return np.asarray(np.where(every, layouts.accumulation, few))


def _distinct(*columns: npt.NDArray[Any]) -> tuple[Array, npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The rows that columns of whole numbers have, each once, where it is found first, and which of them every layout
    has."""
    key, span = np.zeros(len(columns[0])), 1
    for column in columns:
        low = column.min()
        ways = int(column.max() - low) + 1
        key, span = key * ways + (column - low), span * ways
    table = np.stack(columns, axis=1)
    if span < 2**53:
        _, first, which = np.unique(key, return_index=True, return_inverse=True)
    else:  # more than a float tells apart
        _, first, which = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return table[first], first, which.reshape(-1)


@lru_cache(maxsize=16384)
def _unit_bytes(
    arch: Arch, compute: Dtype, reduce: Dtype, sequence: int, direct: int, micro: int, tp: int, gathers: int,
    selective: int, split: int, cp: int, context: int, inner: int, routes: int,
) -> _UnitBytes:  # fmt: skip
    """`context`: index into CONTEXTS; `routes`: experts are on several ranks."""
    sequence //= cp
    setting = Setting(
        micro, sequence, False, True, bool(selective), bool(gathers), tp, direct=bool(direct),
        arriving=micro * sequence * arch.experts.active if routes and arch.experts is not None else None,
        crossing=crossing(cp, ContextSplit(CONTEXTS[context], inner)),
    )  # fmt: skip
    outer = _outer_bytes(arch, compute, reduce, micro * sequence, direct, tp, gathers, split)
    blocks = [(_one(arch, unit, setting, compute, reduce, split), count) for unit, count in _kinds(arch)]
    return _UnitBytes(
        block=sum(each.graph * count for each, count in blocks) // arch.layers,
        embedding=outer[0].graph,
        head=outer[1].graph,
        block_factors=sum(each.factors * count for each, count in blocks) // arch.layers,
        embedding_factors=outer[0].factors,
        head_factors=outer[1].factors,
        block_passing=max(each.passing for each, _ in blocks),
        head_passing=outer[1].passing,
        logits=outer[1].logits,
        rows=rows_bytes(arch, setting, compute),
        entering=micro * sequence * arch.hidden * compute.num_bytes // (tp if gathers else 1),
    )


class _One(NamedTuple):
    """Bytes of one unit: its graph, the logits of it, factors of a split backward, its fullest moment."""

    graph: int
    logits: int
    factors: int
    passing: int


@lru_cache(maxsize=16384)
def _outer_bytes(
    arch: Arch, compute: Dtype, reduce: Dtype, tokens: int, direct: int, tp: int, gathers: int, split: int
) -> tuple[_One, _One]:
    """The embedding and the head, which nothing of attention concerns."""
    setting = Setting(1, tokens, fused_norms=True, gathers=bool(gathers), ways=tp, direct=bool(direct))
    embedding, head = (_one(arch, unit, setting, compute, reduce, split) for unit in (0, arch.head_unit))
    return embedding, head


def _one(arch: Arch, unit: int, setting: Setting, compute: Dtype, reduce: Dtype, split: int) -> _One:
    own = narrowed(arch, setting.ways)
    sizes = graph_sizes(own, unit, setting, compute)
    forward = forward_passing(own, unit, setting, compute, in_place=True)
    if split:
        passing, factors = split_passing(own, unit, setting, compute), stash_bytes(own, unit, setting, compute)
    else:
        moments = backward_passing(own, unit, setting, compute, Gradients(True, reduce.num_bytes, 0))
        passing, factors = max(moments.before, moments.after), 0
    return _One(sum(sizes.values()), sizes[Category.LOGITS], factors, max(forward, passing))


@lru_cache(maxsize=64)
def _kinds(arch: Arch) -> list[tuple[int, int]]:
    """Blocks that are alike, routed or dense, with a window or without: the first of them, and how many."""
    counts: dict[tuple[bool, int], list[int]] = {}
    for layer in range(arch.layers):
        counts.setdefault((arch.is_routed(layer), arch.window(layer)), []).append(layer + 1)
    return [(units[0], len(units)) for units in counts.values()]


@lru_cache(maxsize=16384)
def crests(schedule: Schedule, stage: int, stages: int, micros: int, chunks: int) -> tuple[Crest, ...]:
    """The fullest moments of one stage: those that no other has at least as much of everything at."""
    graphs, factors = [0] * chunks, [0] * chunks
    seen: dict[Crest, None] = {}
    for slot in FUNCTIONS[schedule](stage, stages, micros, chunks):
        match slot.work:
            case Work.FORWARD:
                graphs[slot.chunk] += 1
            case Work.BACKWARD:
                graphs[slot.chunk] -= 1
                factors[slot.chunk] += slot.split
            case Work.WEIGHT:
                factors[slot.chunk] -= 1
        seen[sum(graphs), graphs[0], graphs[-1], sum(factors), factors[0], factors[-1]] = None
    kept: dict[Crest, None] = {}
    for one in sorted(seen, key=sum, reverse=True):  # what covers another has more in all
        if not any(map(_covers, kept, repeat(one))):
            kept[one] = None
    return tuple(one for one in seen if one in kept)


def _covers(other: Crest, one: Crest) -> bool:
    """Whether `other` has at least as much of everything."""
    return all(map(ge, other, one))
