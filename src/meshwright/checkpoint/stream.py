"""New files out of old ones, in constant memory: boxes are filled a few MiB at a time, in the order of the file.

destination   | box 0 | box 1 ................ | box 2 |
windows       |  window 0        |  window 1      | ..     each filled by one `fill` from the source, then written
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.checkpoint.boxes import Part
from meshwright.checkpoint.source import Source, fill
from meshwright.comm.views import narrow
from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import Rectangle, flat_rectangles

__all__ = ["Box", "Filled", "stream"]

_WINDOW_BYTES = 12 << 20


@dataclass(frozen=True, slots=True)
class Box:
    """A tensor of a file to be written, and the logical pieces that make up all of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    @classmethod
    def plain(cls, piece: Piece, dtype: torch.dtype) -> Box:
        return cls(piece.rectangle.extent, dtype, (Part.plain(piece),))


@dataclass(frozen=True, slots=True)
class Filled:
    """A rectangle of box number `box`, contiguous; rectangles come in row-major order."""

    box: int
    rectangle: Rectangle
    values: Tensor


def stream(source: Source, boxes: Sequence[Box], window_bytes: int = _WINDOW_BYTES) -> Iterator[Filled]:
    """All elements of `boxes` in order, cast to their types. Memory: one window, and a block of the source.

    Raises what `fill` raises.
    """
    window: list[Filled] = []
    room = window_bytes
    for number, box in enumerate(boxes):
        total, size, first = _numel(box), box.dtype.itemsize, 0
        while first < total:
            last = min(first + max(room // size, 1), total)
            for rectangle, _ in flat_rectangles(box.shape, first, last):
                window.append(Filled(number, rectangle, torch.empty(rectangle.extent, dtype=box.dtype)))
            room -= (last - first) * size
            first = last
            if room < size:
                yield from _carried(source, boxes, window)
                window, room = [], window_bytes
    yield from _carried(source, boxes, window)


def _carried(source: Source, boxes: Sequence[Box], window: list[Filled]) -> Iterator[Filled]:
    targets: dict[Piece, Tensor] = {}
    for filled in window:
        for part in boxes[filled.box].parts:
            shared = filled.rectangle.intersect(part.in_box)
            if shared is not None:
                view = part.turned(narrow(filled.values, shared.within(filled.rectangle)))
                targets[Piece(part.piece.tensor, part.logical_of(shared))] = view
    fill(source, targets)
    yield from window


def _numel(box: Box) -> int:
    return Rectangle(box.shape, box.shape).numel
