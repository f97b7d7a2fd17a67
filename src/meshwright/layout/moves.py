"""Moves: the list that carries logical tensors from one layout to another.

A layout, here, says which pieces each *end* holds: a rank, a file, host memory. Gathering for a proof, saving, loading,
resharding, export and re-layout in flight are one list with different ends.

    source          A A A A B B B B        moves    A -> x  columns 0-3
    target          x x x x x x y y                 B -> x  columns 4-5
                                                    B -> y  columns 6-7

The list is a pure function of both layouts: every rank computes the same one and carries out its own lines.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

from meshwright.layout.rectangles import Rectangle

__all__ = ["End", "Layout", "Move", "Piece", "UncoveredError", "moves", "owned"]

End = Hashable
"""Whatever holds pieces; only its equality matters."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a logical tensor, in the tensor's own whole, unpadded indices."""

    tensor: str
    rectangle: Rectangle


E = TypeVar("E", bound=End)
T = TypeVar("T", bound=End)

Layout = Mapping[E, Sequence[Piece]]
"""What each end holds. Copies are welcome: the same element may lie on many ends."""


@dataclass(frozen=True, slots=True)
class Move:
    """`rectangle` of `tensor` goes from one end to another; equal ends mean a local copy."""

    source: End
    target: End
    tensor: str
    rectangle: Rectangle


class UncoveredError(ValueError):
    """An element is wanted that nobody holds."""


def moves(source: Layout[E], target: Layout[T]) -> tuple[Move, ...]:
    """How `target` is filled from `source`: every element of every target piece by exactly one move.

    An element comes from the same end where that end holds it; otherwise from the holder that has sent least so far,
    the earlier end of `source` where several have. Moves are in the order of `target`.

    Raises UncoveredError naming an element that no source holds, ValueError where pieces of one target end overlap.
    """
    held = {tensor: _Holdings(entries) for tensor, entries in _by_tensor(source).items()}
    nothing: _Holdings[E] = _Holdings(())
    sent = dict.fromkeys(source, 0)
    out: list[Move] = []
    for end, pieces in target.items():
        _check_disjoint(end, pieces)
        for piece in pieces:
            if not piece.rectangle.numel:
                continue
            holdings = held.get(piece.tensor, nothing)
            for holder, rectangle in holdings.cover(piece, end, sent):
                if holder != end:
                    sent[holder] += rectangle.numel
                out.append(Move(holder, end, piece.tensor, rectangle))
    return tuple(out)


def owned(layout: Layout[E]) -> dict[E, tuple[Piece, ...]]:
    """The layout without copies: each element stays only on the first end that holds it.

    Ranks in ascending order give an element to coordinate 0 of every axis that copies it.
    """
    kept: dict[E, list[Piece]] = {end: [] for end in layout}
    for tensor, entries in _by_tensor(layout).items():
        holdings = _Holdings(entries)
        for number, rectangle in enumerate(holdings.rectangles):
            earlier = (holdings.rectangles[other] for other in holdings.overlapping(rectangle) if other < number)
            kept[holdings.ends[number][0]].extend(Piece(tensor, part) for part in _remainder(rectangle, earlier))
    return {end: tuple(pieces) for end, pieces in kept.items()}


class _Holdings(Generic[E]):
    """Who holds what of one tensor: distinct rectangles in order of first mention, each with its ends.

    Copies share an entry, and a search along dimension 0 finds the few rectangles that can overlap another: thousands
    of shards on thousands of ranks stay a matter of seconds.
    """

    def __init__(self, entries: Iterable[tuple[E, Rectangle]]) -> None:
        holders: dict[Rectangle, list[E]] = defaultdict(list)
        for end, rectangle in entries:
            holders[rectangle].append(end)
        self.rectangles = list(holders)
        self.ends = list(holders.values())
        self._by_start = sorted(range(len(self.rectangles)), key=lambda number: _span(self.rectangles[number])[0])
        spans = [_span(self.rectangles[number]) for number in self._by_start]
        self._starts = [start for start, _ in spans]
        self._reach = list(accumulate((stop for _, stop in spans), max))  # how far any rectangle up to here extends

    def overlapping(self, rectangle: Rectangle) -> Iterator[int]:
        """Numbers of the rectangles that share an element with `rectangle`, by their start on dimension 0."""
        start, stop = _span(rectangle)
        for place in range(bisect_right(self._reach, start), bisect_left(self._starts, stop)):
            number = self._by_start[place]
            if self.rectangles[number].intersect(rectangle) is not None:
                yield number

    def cover(self, piece: Piece, end: End, sent: Mapping[E, int]) -> Iterator[tuple[E, Rectangle]]:
        """Disjoint (holder, rectangle) that make up `piece`, from `end` itself where it can."""
        missing = [piece.rectangle]
        for number in sorted(self.overlapping(piece.rectangle), key=lambda number: end not in self.ends[number]):
            ends = self.ends[number]
            left: list[Rectangle] = []
            for wanted in missing:
                shared = wanted.intersect(self.rectangles[number])
                if shared is not None:
                    same = [holder for holder in ends if holder == end]
                    yield same[0] if same else min(ends, key=sent.__getitem__), shared
                left.extend(wanted.minus(self.rectangles[number]))
            missing = left
            if not missing:
                return
        element = ", ".join(map(str, missing[0].start))
        raise UncoveredError(f"element ({element}) of {piece.tensor}, wanted by {end}, is held by no source")


def _by_tensor(layout: Layout[E]) -> dict[str, list[tuple[E, Rectangle]]]:
    entries: dict[str, list[tuple[E, Rectangle]]] = defaultdict(list)
    for end, pieces in layout.items():
        for piece in pieces:
            if piece.rectangle.numel:
                entries[piece.tensor].append((end, piece.rectangle))
    return entries


def _remainder(rectangle: Rectangle, others: Iterable[Rectangle]) -> list[Rectangle]:
    left = [rectangle]
    for other in others:
        left = [part for whole in left for part in whole.minus(other)]
    return left


def _span(rectangle: Rectangle) -> tuple[int, int]:
    """First and last index on dimension 0; a scalar is one row."""
    return (rectangle.start[0], rectangle.stop[0]) if rectangle.start else (0, 1)


def _check_disjoint(end: End, pieces: Sequence[Piece]) -> None:
    by_tensor: dict[str, list[Rectangle]] = defaultdict(list)
    for piece in pieces:
        for other in by_tensor[piece.tensor]:
            if other.intersect(piece.rectangle) is not None:
                raise ValueError(f"pieces {other} and {piece.rectangle} of {piece.tensor} on {end} overlap")
        by_tensor[piece.tensor].append(piece.rectangle)
