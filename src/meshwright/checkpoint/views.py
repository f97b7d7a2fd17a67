"""Views of pieces, found by any rectangle inside them."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import Rectangle

__all__ = ["Held", "Views", "alone", "bytes_of", "narrow"]

Held = Mapping[Piece, Tensor]
"""A view of each piece, of the shape of its rectangle, of any strides."""


class Views:
    """What an end of a move holds."""

    def __init__(self, held: Held) -> None:
        self._by_tensor: dict[str, list[tuple[Rectangle, Tensor]]] = defaultdict(list)
        for piece, view in held.items():
            self._by_tensor[piece.tensor].append((piece.rectangle, view))

    @property
    def tensors(self) -> Iterable[str]:
        return self._by_tensor.keys()

    def view(self, piece: Piece) -> Tensor:
        """The view of `piece` inside the piece that contains it. Raises LookupError where none does."""
        for outer, view in self._by_tensor.get(piece.tensor, ()):
            if outer.intersect(piece.rectangle) == piece.rectangle:
                return narrow(view, piece.rectangle.within(outer))
        raise LookupError(f"{piece.rectangle} of {piece.tensor} lies in none of the pieces held here")


def narrow(view: Tensor, inner: Rectangle) -> Tensor:
    """The part `inner` of a view, counted from its corner."""
    for dim, (start, size) in enumerate(zip(inner.start, inner.extent, strict=True)):
        if size != view.shape[dim]:
            view = view.narrow(dim, start, size)
    return view


def alone(held: Held) -> Iterator[Piece]:
    """Pieces whose memory is certainly nobody else's among `held`: what is written there stays. Without a look at each
    element: pieces that lie between one another count as if they overlapped."""
    spans = sorted(((*_span(view), piece) for piece, view in held.items() if view.numel()), key=lambda span: span[:2])
    reached = 0
    for number, (first, last, piece) in enumerate(spans):
        following = spans[number + 1][0] if number + 1 < len(spans) else last
        if first >= reached and following >= last:
            yield piece
        reached = max(reached, last)


def _span(view: Tensor) -> tuple[int, int]:
    """The bytes from the first element of a view to the last."""
    length = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)) + 1
    return view.data_ptr(), view.data_ptr() + length * view.element_size()


def bytes_of(flat: Tensor) -> memoryview:
    """The memory of a contiguous tensor (n,) of the host, which must outlive the view.

    By address: a storage that numpy has seen can no longer be released and regrown, and an engine does that.
    """
    size = flat.numel() * flat.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(flat.data_ptr())).cast("B")
