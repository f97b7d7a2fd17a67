"""Linear products that read the same input: one after another, unless a strategy fuses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

Products = Callable[[Tensor, Sequence[nn.Linear]], Sequence[Tensor]]
"""(x (N, D), linears) -> one (N, out) each."""


def separate_products(x_ND: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """Each linear by itself."""
    return [linear(x_ND) for linear in linears]
