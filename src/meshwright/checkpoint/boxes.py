"""Stored boxes: how a tensor of a file and logical tensors map to one another.

    file (in, out), row-major          logical (out, in)
    +---------+---------+---------+
    |  query  |   key   |  value  |    key[i, j] = box[j, corner + i]      permutation (1, 0)
    +---------+---------+---------+
              ^ corner (0, 64)

A checkpoint of our own stores every piece as a box of its own. Files of other programs transpose, join several logical
tensors along a dim, or split one over files; each of these is a part with a corner and a permutation.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import Rectangle

__all__ = ["Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """`piece` is the part of a box at `corner` whose axes are permuted: logical dim d is dim `permutation[d]`."""

    piece: Piece
    corner: tuple[int, ...]
    permutation: tuple[int, ...]

    @classmethod
    def plain(cls, piece: Piece) -> Part:
        """A box of its own."""
        dims = len(piece.rectangle.extent)
        return cls(piece, (0,) * dims, tuple(range(dims)))

    @property
    def in_box(self) -> Rectangle:
        """Where the whole piece lies in the box."""
        return self.box_of(self.piece.rectangle)

    def box_of(self, logical: Rectangle) -> Rectangle:
        """Where a rectangle of the piece, in indices of the logical tensor, lies in the box."""
        inner = logical.within(self.piece.rectangle)
        start, extent = list(self.corner), list(self.corner)
        for dim, axis in enumerate(self.permutation):
            start[axis], extent[axis] = self.corner[axis] + inner.start[dim], inner.extent[dim]
        return Rectangle(tuple(start), tuple(extent))

    def logical_of(self, box: Rectangle) -> Rectangle:
        """The inverse of `box_of`: `box` must lie inside `in_box`."""
        inner = box.within(Rectangle(self.corner, box.extent))
        begin = self.piece.rectangle.start
        start = tuple(begin[dim] + inner.start[axis] for dim, axis in enumerate(self.permutation))
        return Rectangle(start, tuple(inner.extent[axis] for axis in self.permutation))

    def turned(self, view: Tensor) -> Tensor:
        """A view with the box's axes as one with the logical axes."""
        return view.permute(self.permutation)
