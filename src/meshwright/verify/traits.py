"""How a piece differs from the reference's: numbers that a cause leaves behind, taken where the piece lies.

a   the piece as this rank holds it        b   the same rectangle of the reference
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Traits", "largest_difference", "traits_of"]

_MOST_ROWS = 64  # differing rows that are looked for elsewhere


@dataclass(frozen=True, slots=True)
class Traits:
    """Traits of one differing piece. `rows` are indices on dimension 0, counted in the whole tensor."""

    nonfinite: int
    """Elements of a that are not finite."""
    ratio: float
    """<a, b> / <b, b>: what b must be multiplied by to come nearest to a; 0 where b is 0."""
    residual: float
    """max|a - ratio b| / max|b|, of max|ratio b| where that is more: 0 where a is a multiple of b."""
    all_zero: bool
    """a is 0 everywhere."""
    rows: tuple[int, int, int]
    """(first differing row, number of differing rows, rows held that are not 0 in both)."""
    columns: tuple[int, int, int]
    """The same of dimension 1."""
    runs: int
    """Runs of neighbours that the differing rows make among those held that are not 0 in both."""
    zero_rows: int
    """Differing rows that are 0 in a and not in b."""
    displaced: tuple[int, int, int] | None
    """(dim, i, j): index i of a holds what the reference holds at j; None where no differing row is another's."""


def largest_difference(a: Tensor, b: Tensor) -> float:
    """max|a - b| in float64; infinite where only one of them is NaN or infinite."""
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    difference = torch.where(a == b, torch.zeros_like(a), (a - b).abs())
    return float(torch.nan_to_num(difference, nan=float("inf"), posinf=float("inf")).max())


def traits_of(a: Tensor, b: Tensor, start: tuple[int, ...], allowed: float, along: Callable[[int], Tensor]) -> Traits:
    """Describe how a (any shape) differs from b by more than `allowed` an element.

    `start` is the corner of both in the whole tensor; along(dim) gives the reference's box extended to all of `dim`.
    """
    a, b = a.detach().double(), b.double()
    finite = torch.isfinite(a)
    if not bool(finite.all()):
        return Traits(int((~finite).sum()), 0.0, 0.0, False, (0, 0, 0), (0, 0, 0), 0, 0, None)
    squared, largest = float((b * b).sum()), float(b.abs().max())
    ratio = float((a * b).sum()) / squared if squared else 0.0
    residual = float((a - ratio * b).abs().max()) / (largest * max(abs(ratio), 1.0)) if largest else float("inf")
    different = (a - b).abs() > allowed
    there = (a != 0) | (b != 0)
    spread = [_differing(different, there, dim, start) for dim in (0, 1)]
    lost = _rows_where(different, 0) & ~_rows_where(a != 0, 0) & _rows_where(b != 0, 0) if a.dim() else different
    return Traits(
        0, ratio, residual, not bool((a != 0).any()), spread[0], spread[1], _runs(different, there), int(lost.sum()),
        _displaced(a, b, different, start, allowed, along),
    )  # fmt: skip


def _rows_where(flags: Tensor, dim: int) -> Tensor:
    """(extent[dim],) whether any element of each slice is set."""
    return flags.transpose(0, dim).flatten(1).any(1) if flags.dim() > 1 else flags


def _runs(different: Tensor, there: Tensor) -> int:
    if not different.dim():
        return int(different)
    rows = _rows_where(different, 0)[_rows_where(there, 0)].int()
    return int((torch.diff(rows, prepend=rows.new_zeros(1)) > 0).sum())


def _differing(different: Tensor, there: Tensor, dim: int, start: tuple[int, ...]) -> tuple[int, int, int]:
    if different.dim() <= dim:
        return 0, 0, 0
    rows = _rows_where(different, dim)
    first = int(rows.nonzero()[0]) if bool(rows.any()) else 0
    return start[dim] + first, int(rows.sum()), int(_rows_where(there, dim).sum())


def _displaced(
    a: Tensor, b: Tensor, different: Tensor, start: tuple[int, ...], allowed: float, along: Callable[[int], Tensor]
) -> tuple[int, int, int] | None:
    """A differing slice of a that is another slice of the reference; slices of zeros say nothing."""
    for dim in range(min(a.dim(), 2)):
        if a.dim() < 2:
            return None  # single numbers meet by chance
        whole = along(dim).double().transpose(0, dim).flatten(1)
        mine = a.transpose(0, dim).flatten(1)
        rows = (_rows_where(different, dim) & (mine != 0).any(1)).nonzero().flatten()[:_MOST_ROWS]
        for row in rows.tolist():
            matches = ((whole - mine[row]).abs().amax(1) <= allowed).nonzero().flatten().tolist()
            if matches:
                return dim, start[dim] + row, matches[0]
    return None
