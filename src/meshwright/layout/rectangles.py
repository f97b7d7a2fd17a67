"""Rectangles of a logical tensor, and flat ranges of a box as few rectangles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rectangle:
    """The elements start[d] <= i[d] < start[d] + extent[d] of a tensor; a scalar has no dimensions."""

    start: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.extent)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(first + size for first, size in zip(self.start, self.extent, strict=True))

    def intersect(self, other: Rectangle) -> Rectangle | None:
        """What both cover, or None."""
        start = tuple(map(max, self.start, other.start))
        extent = tuple(min(a, b) - first for a, b, first in zip(self.stop, other.stop, start, strict=True))
        return Rectangle(start, extent) if all(size > 0 for size in extent) else None

    def minus(self, other: Rectangle) -> Iterator[Rectangle]:
        """What `other` leaves of it, as at most two disjoint rectangles a dimension.

        1 1 1 1 1        1, 2: before and after on dimension 0
        3 x x x 4        3, 4: the same on dimension 1, between them
        2 2 2 2 2
        """
        shared = self.intersect(other)
        if shared is None:
            yield self
            return
        start, stop = list(self.start), list(self.stop)
        for dim, (low, high) in enumerate(zip(shared.start, shared.stop, strict=True)):
            for first, last in ((start[dim], low), (high, stop[dim])):
                if first < last:
                    corner = (*start[:dim], first, *start[dim + 1 :])
                    end = (*stop[:dim], last, *stop[dim + 1 :])
                    yield Rectangle(corner, tuple(b - a for a, b in zip(corner, end, strict=True)))
            start[dim], stop[dim] = low, high

    def within(self, outer: Rectangle) -> Rectangle:
        """The same elements, counted from the corner of `outer`."""
        return Rectangle(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.extent)

    def offset_by(self, corner: tuple[int, ...]) -> Rectangle:
        """The inverse of `within`: what was counted from `corner`, counted from where `corner` is."""
        return Rectangle(tuple(a + b for a, b in zip(corner, self.start, strict=True)), self.extent)


def full(shape: tuple[int, ...]) -> Rectangle:
    return Rectangle((0,) * len(shape), shape)


def flat_rectangles(shape: tuple[int, ...], first: int, last: int) -> Iterator[tuple[Rectangle, int]]:
    """The flat range [first, last) of a row-major box as at most 2k - 1 rectangles, each with its flat offset.

    . . . A A A        A: the tail of the first row
    B B B B B B        B: whole rows
    C C . . . .        C: the head of the last row
    """
    if first >= last:
        return
    if len(shape) <= 1:
        yield Rectangle((first,) if shape else (), (last - first,) if shape else ()), first
        return
    row = math.prod(shape[1:])
    top, low = divmod(first, row)
    bottom, high = divmod(last, row)
    if top == bottom or (top + 1 == bottom and high == 0 and low):
        yield from _in_row(shape, top, low, last - top * row)
        return
    if low:
        yield from _in_row(shape, top, low, row)
        top += 1
    if bottom > top:
        yield Rectangle((top, *(0,) * (len(shape) - 1)), (bottom - top, *shape[1:])), top * row
    if high:
        yield from _in_row(shape, bottom, 0, high)


def _in_row(shape: tuple[int, ...], row: int, low: int, high: int) -> Iterator[tuple[Rectangle, int]]:
    size = math.prod(shape[1:])
    for inner, offset in flat_rectangles(shape[1:], low, high):
        yield Rectangle((row, *inner.start), (1, *inner.extent)), row * size + offset
