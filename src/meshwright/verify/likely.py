"""From the traits of a difference to its likely cause. Pure: numbers in, a word and a sentence out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from meshwright.layout.axes import Axis
from meshwright.layout.groups import Group, GroupName
from meshwright.layout.rectangles import Rectangle
from meshwright.plan.meeting import plan_groups
from meshwright.plan.plan import Plan
from meshwright.verify.trace import Kind
from meshwright.verify.traits import Traits

__all__ = ["Cause", "Differing", "Likely", "likely_cause", "likely_factor"]

_EXACT = 1e-7  # in float64 a factor or a sum that is really one is met far better than this

_UPDATED = (Kind.FIRST, Kind.LAST)
"""Kinds whose traits are those of the updates since the start."""


class Cause(StrEnum):
    FACTOR = "factor"
    MISSING_SUM = "missing sum"
    DOUBLE = "counted twice"
    ROWS = "wrong rows"
    PADDING = "padding"
    MASK = "mask"
    ORDER = "order"
    STALE = "stale"
    PRECISION = "precision"
    RANDOMNESS = "randomness"
    UNWRITTEN = "not written"
    NONFINITE = "not finite"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Likely:
    cause: Cause
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Differing:
    """A piece that differs, on one rank."""

    rank: int
    rectangle: Rectangle
    traits: Traits


def likely_cause(plan: Plan, kind: Kind, figure: float, pieces: Sequence[Differing], rounding: float = 0.0) -> Likely:
    """The first of these that fits: what is certain from the values before what is merely usual.

    `rounding`: the relative difference that the precision of the run explains.
    """
    exact = max(_EXACT, rounding)
    one = pieces[0].traits
    if one.nonfinite:
        return Likely(Cause.NONFINITE, f"{one.nonfinite} elements are not finite")
    if all(piece.traits.all_zero for piece in pieces):
        never = "unchanged: never updated" if kind in _UPDATED else "all zeros: never written, or never summed"
        return Likely(Cause.UNWRITTEN, never)
    for found in (_factor(plan, pieces, exact), _missing_sum(plan, pieces, exact), _rows(kind, one)):
        if found is not None:
            return found
    if figure < 1e-4:
        cause = Cause.ORDER if figure < 1e-9 else Cause.PRECISION
        return Likely(cause, "sums in another order" if cause is Cause.ORDER else "a lower precision on the way")
    return _partial(plan, kind, one)


def likely_factor(plan: Plan, ratio: float, exact: float = _EXACT) -> Likely:
    """What a number that is `ratio` times too large was multiplied by."""
    for name, value in _degrees(plan):
        inverse = f"1/({name})" if " " in name else f"1/{name}"
        for text, factor in ((name, value), (inverse, 1 / value)):
            if abs(ratio / factor - 1) < exact:
                return Likely(Cause.FACTOR, f"a factor of {ratio:.6g}, which is {text}")
    return Likely(Cause.FACTOR, f"a factor of {ratio:.6g}")


def _factor(plan: Plan, pieces: Sequence[Differing], exact: float) -> Likely | None:
    """Every piece is the same multiple of the reference's."""
    ratios = [piece.traits.ratio for piece in pieces]
    ratio = ratios[0]
    multiples = all(piece.traits.residual < exact for piece in pieces)
    if not multiples or not ratio or any(abs(other / ratio - 1) > exact for other in ratios):
        return None
    return None if abs(ratio - 1) < exact else likely_factor(plan, ratio, exact)


def _degrees(plan: Plan) -> Iterator[tuple[str, int]]:
    """Products of the degrees at work, the simplest first: what a wrong normalisation multiplies or divides by."""
    ways = {axis.value: plan.degrees.on(axis) for axis in Axis if plan.degrees.on(axis) > 1}
    if plan.accumulation > 1:
        ways["accumulation"] = plan.accumulation
    for size in range(1, len(ways) + 1):
        for names in combinations(ways, size):
            yield " x ".join(names), math.prod(ways[name] for name in names)
    for name, value in ways.items():
        yield f"{name}^2", value**2
    if plan.accumulation > 1:
        yield "sequences of a micro-batch", plan.batch.micro


def _missing_sum(plan: Plan, pieces: Sequence[Differing], exact: float) -> Likely | None:
    """Copies differ, and over some group they add up to the reference: <Σ a_r, b> = <b, b>."""
    by_rank: Mapping[tuple[int, Rectangle], float] = {(p.rank, p.rectangle): p.traits.ratio for p in pieces}
    tried: set[tuple[int, ...]] = set()
    for group in plan_groups(plan).values():
        ranks = _ranks(plan, group, pieces[0].rank)
        if len(ranks) < 2 or ranks in tried:
            continue
        tried.add(ranks)
        ratios = [by_rank.get((rank, pieces[0].rectangle), math.nan) for rank in ranks]
        if len(set(ratios)) > 1 and abs(sum(ratios) - 1) < exact:
            return Likely(Cause.MISSING_SUM, f"each rank holds its own part: no sum over {_axes(plan, group)}")
    return None


def _ranks(plan: Plan, group: Group, rank: int) -> tuple[int, ...]:
    return group.members(plan.degrees, plan.degrees.coordinates(rank))


def _axes(plan: Plan, group: Group) -> str:
    if group.name in (GroupName.SHARD, GroupName.COPY, GroupName.TIED):
        return group.name.value
    return " x ".join(axis.value for axis in group.factor.axes if plan.degrees.on(axis) > 1)


def _rows(kind: Kind, one: Traits) -> Likely | None:
    if one.displaced is not None:
        dim, at, source = one.displaced
        what = "sequence" if kind is Kind.ACTIVATION and dim == 0 else ("row", "column")[dim]
        return Likely(Cause.ROWS, f"{what} {at} holds what belongs at {source}")
    first, number, total = one.rows
    if one.runs > 1 and kind is not Kind.ACTIVATION:
        return None  # padding and cuts come in one run; rows here and there are the tokens that were read
    if one.zero_rows:
        what = "unchanged" if kind in _UPDATED else "zero"
        return Likely(Cause.PADDING, f"{one.zero_rows} of {total} rows are {what}, the first differing is {first}")
    if kind is Kind.ACTIVATION:
        position, positions, length = one.columns
        if 0 < positions < length:
            return Likely(Cause.MASK, f"only {positions} of {length} positions differ, from {position} on")
        if 0 < number < total:
            return Likely(Cause.MASK, f"only {number} of {total} sequences differ, the first is {first}")
    elif 0 < number < total:
        return Likely(Cause.PADDING, f"only {number} of {total} rows differ, the first is {first}")
    return None


def _partial(plan: Plan, kind: Kind, one: Traits) -> Likely:
    if kind is Kind.ACTIVATION:
        if plan.arch.dropout:
            return Likely(Cause.RANDOMNESS, "differs everywhere: other random numbers, or another function")
        return Likely(Cause.OTHER, "differs everywhere: other inputs, positions or masks, or another function")
    if 0.02 < one.ratio < 0.98:
        return Likely(Cause.MISSING_SUM, f"about {one.ratio:.2f} of it is there: a part of a sum is missing")
    if one.ratio > 1.02:
        return Likely(Cause.DOUBLE, f"about {one.ratio:.2f} times as much: a part is counted twice")
    return Likely(Cause.OTHER, "differs everywhere, and is no multiple of what it should be")
