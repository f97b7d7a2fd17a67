"""Fingerprints of tensors where they lie: `layout.fingerprint` on a device, in constant memory.

Everything is a sum over a matrix: lines of units along the last dimension, with a weight for each unit of a line, and
one for each line, the product of those of its other dimensions.

            line   h h h h h h
    rows  w        b b b b b b
          w        b b b b b b        Σ_r rows(r) Σ_c line(c) bits(r, c)    mod 2^64
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from meshwright.checkpoint.errors import DamagedError
from meshwright.checkpoint.views import bytes_of
from meshwright.comm.views import narrow
from meshwright.layout.fingerprint import UNIT_BYTES, Words, add, multipliers, shown, units_of
from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import Rectangle, flat_rectangles, full

__all__ = ["Fingerprints", "Signing", "check_fingerprint", "fingerprint"]

_PART_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 22}
"""What is copied, and has its weights computed, at once."""
_MOST_WEIGHTS = 1 << 20
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_UNSIGNED_TENSOR = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


class Fingerprints:
    """The fingerprints of tensors, fed piece by piece in any order.

    What ranks have in `sums`, added mod 2^64, are the fingerprints of whole tensors if each element was taken once.
    """

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}

    def take(self, piece: Piece, view: Tensor) -> None:
        """Add what `view` holds: the elements of the piece as they are stored, in its shape, of any strides, on any
        device, of any dtype of 1, 2, 4 or 8 bytes. Raises ValueError for another shape."""
        rectangle, view = piece.rectangle, view.detach()
        if tuple(view.shape) != rectangle.extent:
            raise ValueError(f"a view of shape {tuple(view.shape)} is not the rectangle of {rectangle.extent}")
        if Signing.can(view):
            self.add(piece.tensor, Signing.whole(rectangle, view))
            return
        for inner in _parts(rectangle.extent, _PART_ELEMENTS.get(view.device.type, 1 << 22)):
            part, values = inner.offset_by(rectangle.start), narrow(view, inner).contiguous()
            self.add(piece.tensor, Signing.whole(part, values) if Signing.can(values) else _on_device(part, values))

    def add(self, tensor: str, value: int) -> None:
        """Add what a part of a tensor comes to."""
        self.sums[tensor] = add((self.of(tensor), value))

    def of(self, tensor: str) -> int:
        """The sum so far; 0 of a tensor of which nothing came."""
        return self.sums.get(tensor, 0)


class Signing:
    """Takes one piece a part at a time: what has just come is still in a core's cache.

    Raises ValueError for a view of which `can` is not true.
    """

    def __init__(self, rectangle: Rectangle, view: Tensor) -> None:
        if not self.can(view):
            raise ValueError(f"{rectangle} does not lie in host memory as a matrix does")
        size = view.element_size()
        self._per_element = units_of(size)
        self._rows, self._line = _weights(rectangle, size)
        memory = bytes_of(view.reshape(-1))  # numpy is given addresses, never a storage
        self._units = np.frombuffer(memory, _UNSIGNED[min(size, UNIT_BYTES)]).reshape(len(self._rows), -1)
        self._sums = np.zeros_like(self._rows)
        dims = [1, *rectangle.extent[:-1]]
        self._strides = [math.prod(dims[dim + 1 :]) for dim in range(len(dims) - 1)]
        """How many lines an index of each dimension but the last two is apart."""

    @classmethod
    def whole(cls, rectangle: Rectangle, view: Tensor) -> int:
        """What all of a piece comes to."""
        signing = cls(rectangle, view)
        signing.took(full(rectangle.extent))
        return signing.value()

    @staticmethod
    def can(view: Tensor) -> bool:
        """Whether a piece lies in host memory as a matrix does, and its weights take little of it."""
        line = view.shape[-1] if view.dim() else 1
        num_weights = max(line, view.numel() // max(line, 1))
        return view.device.type == "cpu" and view.is_contiguous() and 0 < num_weights <= _MOST_WEIGHTS

    def took(self, inner: Rectangle) -> None:
        """The elements of `inner`, counted from the corner of the piece, are in their places."""
        *outer, (row, num_rows) = [(0, 1), *zip(inner.start[:-1], inner.extent[:-1], strict=True)]
        low, size = (inner.start[-1], inner.extent[-1]) if inner.extent else (0, 1)
        units = slice(low * self._per_element, (low + size) * self._per_element)
        for place in itertools.product(*(range(start, start + count) for start, count in outer)):
            top = row + sum(index * lines for index, lines in zip(place, self._strides, strict=True))
            rows = slice(top, top + num_rows)
            # numpy widens a few thousand units at a time, in the first cache: no pass over memory of its own
            self._sums[rows] += np.einsum("ij,j->i", self._units[rows, units], self._line[units])

    def value(self) -> int:
        """What all that came adds to the fingerprint of the tensor."""
        return int(np.einsum("i,i->", self._sums, self._rows))


def check_fingerprint(file: str, tensor: str, expected: int, actual: int) -> None:
    """Raise DamagedError where a tensor of the checkpoint of manifest `file` is not what was saved."""
    if actual != expected:
        raise DamagedError(file, "the fingerprint", tensor=tensor, expected=shown(expected), actual=shown(actual))


@torch.no_grad()
def fingerprint(view: Tensor, rectangle: Rectangle) -> int:
    """The part that `view` adds to the fingerprint of a tensor of which it holds `rectangle`: see `Fingerprints`."""
    prints = Fingerprints()
    prints.take(Piece("", rectangle), view)
    return prints.of("")


def _parts(extent: tuple[int, ...], most: int) -> Iterator[Rectangle]:
    """A box as rectangles of at most so many elements."""
    numel = math.prod(extent)
    for low in range(0, numel, most):
        for rectangle, _ in flat_rectangles(extent, low, min(low + most, numel)):
            yield rectangle


def _weights(rectangle: Rectangle, element_bytes: int) -> tuple[Words, Words]:
    """(rows,) the weights of lines, and (line,) those of the units of each."""
    spans = list(zip(rectangle.start, rectangle.extent, strict=True)) or [(0, 1)]
    rows = np.ones(1, dtype=np.uint64)
    for dim, (start, size) in enumerate(spans[:-1]):
        rows = np.multiply.outer(rows, multipliers(dim, start, size)).reshape(-1)
    units, (start, size) = units_of(element_bytes), spans[-1]
    return rows, _line(len(spans) - 1, start * units, size * units)


@lru_cache(maxsize=8)
def _line(dim: int, start: int, size: int) -> Words:
    """`multipliers`: many pieces of a model have lines of one length."""
    words = multipliers(dim, start, size)
    words.flags.writeable = False
    return words


def _on_device(rectangle: Rectangle, values: Tensor) -> int:
    """The sum over contiguous `values`, with torch."""
    size = values.element_size()
    rows, line = (torch.tensor(words.view(np.int64), device=values.device) for words in _weights(rectangle, size))
    units = values.reshape(-1).view(_UNSIGNED_TENSOR[min(size, UNIT_BYTES)]).reshape(len(rows), len(line))
    return int(((units.to(torch.int64) * line).sum(-1) * rows).sum())
