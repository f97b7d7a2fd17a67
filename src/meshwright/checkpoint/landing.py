"""Where a wanted rectangle of a stored tensor goes, whatever part of the file is at hand.

    file       ... [ . . a a a a . . b b b b . . c c c c ] ...      a stored box; wanted: columns 2 to 5
    landing            a a a a b b b b c c c c                       or every other element of something, or its columns

A part of a file holds a flat range of the box, that is a few rectangles (`flat_rectangles`); what they share with the
wanted one is copied to where it belongs, cast and turned on the way (`boxes`). Where file and memory hold equal bytes
in the same order, nothing needs to be copied: the file can be read into that memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from meshwright.checkpoint.boxes import Part
from meshwright.checkpoint.views import bytes_of
from meshwright.comm.views import narrow
from meshwright.layout.rectangles import Rectangle, flat_rectangles

if TYPE_CHECKING:
    from meshwright.checkpoint.source import Stored

__all__ = ["Landed", "Landing", "Straight", "nobody"]

Landed = Callable[[Rectangle], None]
"""Hears of each part of a landing, counted from its corner, once it is in its place and still in a core's cache."""


def nobody(inner: Rectangle) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True)
class Straight:
    """Bytes of a file from `begin` on that are to be read into `memory`, which is theirs to the end of `landing`'s.

    `line_bytes`: what an index of the outermost dimension takes; reading in multiples of it lands whole rectangles.
    """

    landing: Landing
    begin: int
    memory: memoryview

    @property
    def end(self) -> int:
        return self.begin + len(self.memory)

    def requests(self, limit: int) -> Iterator[tuple[int, memoryview]]:
        """Which bytes to ask for at once, at most `limit`: whole lines where they fit."""
        line = self.landing.line_bytes
        low = self.begin
        while low < self.end:
            high = low + limit
            torn = (high - self.landing.begin) % line
            high = min(high - torn if torn < limit else high, self.end)
            yield low, self.memory[low - self.begin : high - self.begin]
            low = high


@dataclass(frozen=True, slots=True)
class Landing:
    """`wanted`, a rectangle of the box of `stored`, goes to `view`, which has the logical axes.

    Bytes [begin, end) of the file run from the first wanted element to the last. `straight` is the memory of `view`
    where it is to hold these very bytes. `landed` hears of what has come.
    """

    stored: Stored
    wanted: Rectangle
    view: Tensor
    begin: int
    end: int
    straight: memoryview | None
    landed: Landed

    @classmethod
    def of(cls, stored: Stored, logical: Rectangle, view: Tensor, landed: Landed = nobody) -> Landing:
        """Of a rectangle in indices of the logical tensor."""
        wanted = stored.part.box_of(logical)
        strides = [math.prod(stored.box[dim + 1 :]) for dim in range(len(stored.box))]
        first = sum(low * stride for low, stride in zip(wanted.start, strides, strict=True))
        last = sum((stop - 1) * stride for stop, stride in zip(wanted.stop, strides, strict=True)) + 1
        size = stored.dtype.itemsize
        same = (
            last - first == wanted.numel
            and stored.part.permutation == tuple(range(len(stored.box)))
            and view.dtype is stored.dtype
            and view.device.type == "cpu"
            and view.is_contiguous()
        )
        straight = bytes_of(view.reshape(-1)) if same else None
        return cls(stored, wanted, view, stored.offset + first * size, stored.offset + last * size, straight, landed)

    @property
    def line_bytes(self) -> int:
        """What an index of the outermost dimension takes of the wanted rectangle."""
        return math.prod(self.wanted.extent[1:]) * self.stored.dtype.itemsize

    def within(self, begin: int, end: int) -> Straight | None:
        """Which of the bytes [begin, end) of the file can be read straight, where some can."""
        first, last = max(begin, self.begin), min(end, self.end)
        if self.straight is None or first >= last:
            return None
        return Straight(self, first, self.straight[first - self.begin : last - self.begin])

    def came(self, begin: int, end: int) -> None:
        """Bytes [begin, end) have been read straight."""
        size = self.stored.dtype.itemsize
        first, last = (begin - self.begin) // size, (end - self.begin) // size
        for inner, _ in flat_rectangles(self.wanted.extent, first, last):
            self.landed(inner)

    def copy(self, block: Tensor, begin: int) -> None:
        """Take what `block` (bytes, uint8), which starts at byte `begin` of the file, has of what is wanted."""
        if begin >= self.end or begin + block.numel() <= self.begin:
            return
        stored, size = self.stored, self.stored.dtype.itemsize
        first = max(begin - stored.offset, 0) // size
        last = min((begin + block.numel() - stored.offset) // size, math.prod(stored.box))
        for rectangle, flat in flat_rectangles(stored.box, first, last):
            shared = rectangle.intersect(self.wanted)
            if shared is None:
                continue
            where = stored.offset + flat * size - begin
            here = block[where : where + rectangle.numel * size].view(stored.dtype).view(rectangle.extent)
            part = narrow(here, shared.within(rectangle))
            inner = shared.within(self.wanted)
            place = Rectangle(_turned(inner.start, stored.part), _turned(inner.extent, stored.part))
            narrow(self.view, place).copy_(stored.part.turned(part).reshape(place.extent))
            self.landed(place)


def _turned(dims: tuple[int, ...], part: Part) -> tuple[int, ...]:
    return tuple(dims[axis] for axis in part.permutation)
