"""Fingerprints of tensors where they lie: `layout.fingerprint` on a device, in constant memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshwright.layout.fingerprint import Words, add, multipliers
from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import Rectangle

__all__ = ["fingerprint", "fingerprints"]

_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 22}  # cpu: a chunk as int64 stays in the second cache
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.int64}
_BITS = (1 << 64) - 1


def fingerprints(held: Iterable[tuple[Piece, Tensor]]) -> dict[str, int]:
    """What pieces add to the fingerprint of each tensor: sums over ranks mod 2^64 are those of whole tensors.

    Pass each element once over all ranks (`layout.moves.owned`).
    """
    out: dict[str, int] = {}
    for piece, view in held:
        out[piece.tensor] = add((out.get(piece.tensor, 0), fingerprint(view, piece.rectangle)))
    return out


@torch.no_grad()
def fingerprint(view: Tensor, rectangle: Rectangle) -> int:
    """The part that `view`, the elements of `rectangle` as they are stored, adds to the tensor's fingerprint.

    `view` has the shape of the rectangle, any strides, any dtype of 1, 2, 4 or 8 bytes. Raises ValueError for another
    shape.
    """
    if tuple(view.shape) != rectangle.extent:
        raise ValueError(f"a view of shape {tuple(view.shape)} is not the rectangle of {rectangle.extent}")
    if not rectangle.numel:
        return 0
    bits = view.detach().view(_UNSIGNED[view.element_size()])
    spans = enumerate(zip(rectangle.start, rectangle.extent, strict=True))
    words = [multipliers(dim, *span) for dim, span in spans]
    if view.device.type == "cpu":
        return _sum_on_host(bits, words)
    tables = [torch.from_numpy(each.view("int64")).to(view.device) for each in words]
    return int(_sum(bits, tables)) & _BITS


def _sum_on_host(bits: Tensor, tables: list[Words]) -> int:
    """`_sum` in numpy, whose contraction of uint64 multiplies and adds in one pass: twice as fast as torch's two.

    numpy sees copies of the chunks only: a storage that it has seen can no longer be released and regrown.
    """
    if not tables:
        return int(bits)
    chunk = _CHUNK_ELEMENTS["cpu"]
    row = bits[0].numel()
    if row > chunk:
        parts = np.array([_sum_on_host(each, tables[1:]) for each in bits], dtype=np.uint64)
        return int(np.einsum("i,i->", parts, tables[0]))
    total, run = 0, max(chunk // row, 1)
    widened = torch.empty((min(run, bits.shape[0]), *bits.shape[1:]), dtype=torch.int64)
    for low in range(0, bits.shape[0], run):
        rows = bits[low : low + run]
        words: npt.NDArray[np.uint64] = widened[: len(rows)].copy_(rows).numpy().view(np.uint64)
        for table in reversed(tables[1:]):
            words = np.einsum("...j,j->...", words, table)
        total += int(np.einsum("i,i->", words, tables[0][low : low + run]))
    return total & _BITS


def _sum(bits: Tensor, tables: list[Tensor]) -> Tensor:
    """Σ bits(i) Π h_d(i_d) over a box, () int64: a run of rows at a time; longer rows are cut themselves."""
    if not tables:
        return bits.to(torch.int64)
    chunk = _CHUNK_ELEMENTS.get(bits.device.type, 1 << 22)
    row = bits[0].numel()
    if row > chunk:
        rows = torch.stack([_sum(each, tables[1:]) for each in bits])
        return (rows * tables[0]).sum()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    run = max(chunk // row, 1)
    for low in range(0, bits.shape[0], run):
        words = bits[low : low + run].to(torch.int64, copy=True)  # multiplied in place
        for table in reversed(tables[1:]):
            words = words.mul_(table).sum(-1)
        total += (words * tables[0][low : low + run]).sum()
    return total
