"""The process mesh: five axes, their degrees, and the map rank <-> coordinates.

    order = pp, dp, ep, cp, tp  (outermost first; tp varies fastest)      degrees dp=2 tp=2

    rank   0        1        2        3
    coords dp0 tp0  dp0 tp1  dp1 tp0  dp1 tp1

An axis, or a run of axes read as one index, may be *factored*: index = (outer * degree + digit) * stride + inner. A
`Factor` names one digit of that index. tp = kv_cut x kv_copy, cp = ring x ulysses and replicas = copy x shard are
three uses of the same arithmetic; a whole axis is the factor with stride 1 and the full degree. Cuts and groups are
written in factors, never in axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral

from meshwright.config.choices import AxisName as Axis

__all__ = ["DEFAULT_ORDER", "Axis", "Coordinates", "Degrees", "Factor", "split", "whole"]


DEFAULT_ORDER = tuple(Axis)


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where one rank stands: an index on each axis."""

    dp: int = 0
    tp: int = 0
    pp: int = 0
    cp: int = 0
    ep: int = 0

    def on(self, axis: Axis) -> int:
        value: int = getattr(self, axis.value)
        return value


@dataclass(frozen=True, slots=True)
class Degrees:
    """How many ways each axis divides the run; R = dp * tp * pp * cp * ep ranks. `order` is outermost first."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    order: tuple[Axis, ...] = DEFAULT_ORDER

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(Axis):
            raise ValueError(f"order must name each of {', '.join(Axis)} once, got {', '.join(self.order)}")
        for axis in Axis:
            if not isinstance(self.on(axis), Integral) or self.on(axis) < 1:
                raise ValueError(f"{axis} = {self.on(axis)!r}: a degree must be an integer, at least 1")

    def __str__(self) -> str:
        """The axes of more than one rank, outermost first: "dp 2 x tp 4"."""
        return " x ".join(f"{axis} {self.on(axis)}" for axis in self.order if self.on(axis) > 1) or "one process"

    def on(self, axis: Axis) -> int:
        degree: int = getattr(self, axis.value)
        return degree

    @property
    def ranks(self) -> int:
        return math.prod(self.on(axis) for axis in Axis)

    def over(self, *axes: Axis) -> int:
        """The degree of several axes read as one."""
        return math.prod(self.on(axis) for axis in axes)

    def stride(self, axis: Axis) -> int:
        """How far apart in rank two neighbours on `axis` are."""
        inner = self.order[self.order.index(axis) + 1 :]
        return self.over(*inner)

    def coordinates(self, rank: int) -> Coordinates:
        digits, left = {}, rank
        for axis in reversed(self.order):
            left, digits[axis.value] = divmod(left, self.on(axis))
        if left:
            raise ValueError(f"rank must lie in 0 .. {self.ranks - 1}, got {rank}")
        return Coordinates(**digits)

    def rank(self, at: Coordinates) -> int:
        return sum(at.on(axis) * self.stride(axis) for axis in Axis)

    def index(self, axes: tuple[Axis, ...], at: Coordinates) -> int:
        """The coordinates on `axes` read as one number, outermost (in mesh order) first."""
        index = 0
        for axis in sorted(axes, key=self.order.index):
            index = index * self.on(axis) + at.on(axis)
        return index


@dataclass(frozen=True, slots=True)
class Factor:
    """One digit of the index over `axes`: (index // stride) % degree."""

    axes: tuple[Axis, ...]
    degree: int
    stride: int = 1

    def of(self, degrees: Degrees, at: Coordinates) -> int:
        return degrees.index(self.axes, at) // self.stride % self.degree


def whole(degrees: Degrees, *axes: Axis) -> Factor:
    """The factor that is all of `axes`."""
    return Factor(axes, degrees.over(*axes))


def split(degrees: Degrees, inner: int, *axes: Axis) -> tuple[Factor, Factor]:
    """Factor `axes` into (outer, inner): neighbours on the innermost axis share the outer digit."""
    total = degrees.over(*axes)
    if inner < 1 or total % inner:
        raise ValueError(f"{' x '.join(axes)} = {total} cannot be cut into groups of {inner}")
    return Factor(axes, total // inner, stride=inner), Factor(axes, inner)
