"""Where a wanted rectangle of a stored tensor goes, whatever part of the file is at hand.

    file       ... [ . . a a a a . . b b b b . . c c c c ] ...      a stored box; wanted: columns 2 to 5
    landing            a a a a b b b b c c c c                       or every other element of something, or its columns

A part of a file holds a flat range of the box, that is a few rectangles (`flat_rectangles`); what they share with the
wanted one is copied to where it belongs, cast and turned on the way (`boxes`). Where file and memory hold equal bytes
in the same order, nothing needs to be copied: the file can be read into that memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from meshwright.checkpoint.boxes import Part
from meshwright.checkpoint.views import bytes_of, narrow
from meshwright.layout.rectangles import Rectangle, flat_rectangles

if TYPE_CHECKING:
    from meshwright.checkpoint.source import Stored

__all__ = ["Landing"]


@dataclass(frozen=True, slots=True)
class Landing:
    """`wanted`, a rectangle of the box of `stored`, goes to `view`, which has the logical axes.

    Bytes [begin, end) of the file run from the first wanted element to the last. `straight` is the memory of `view`
    where it is to hold these very bytes.
    """

    stored: Stored
    wanted: Rectangle
    view: Tensor
    begin: int
    end: int
    straight: memoryview | None

    @classmethod
    def of(cls, stored: Stored, logical: Rectangle, view: Tensor) -> Landing:
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
        return cls(stored, wanted, view, stored.offset + first * size, stored.offset + last * size, straight)

    def within(self, begin: int, end: int) -> tuple[int, memoryview]:
        """Which of the bytes [begin, end) of the file can be read straight: from which one on, and into what memory.
        Empty memory where none can."""
        first, last = max(begin, self.begin), min(end, self.end)
        if self.straight is None or first >= last:
            return begin, memoryview(b"")
        return first, self.straight[first - self.begin : last - self.begin]

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


def _turned(dims: tuple[int, ...], part: Part) -> tuple[int, ...]:
    return tuple(dims[axis] for axis in part.permutation)
