"""The memory that views lie in."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from torch import Tensor

from meshwright.comm.views import Held
from meshwright.layout.moves import Piece

__all__ = ["alone", "bytes_of"]


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
