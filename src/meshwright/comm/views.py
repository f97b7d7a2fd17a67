"""Views of the pieces that a rank holds, found by any rectangle inside them: an end of every move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import Tensor

from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import Rectangle

__all__ = ["Held", "Views", "narrow"]

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
