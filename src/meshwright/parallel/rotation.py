"""Rotation of queries and keys by the position as one step of autograd, in the memory of its outputs.

    forward     (a, b) -> (a cos - b sin, b cos + a sin)         the halves a, b of a head's elements
    backward    the same by the negative angle; only the tables are kept, which are alive anyway

B  sequences      S  tokens of each      H  heads, G  of keys      K  elements of a head
F = K / 2  frequencies

A step of autograd costs 30 microseconds in a loop of its own, and twice that between products, which leave the caches
full of weights: so both are turned in one, and no guard against a second derivative is set up, which nobody takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.model.attention import Attention

__all__ = ["apply_rotation", "direct_rotate"]


def apply_rotation(units: Iterable[nn.Module]) -> None:
    """Replace the rotation of every attention of these units, in place."""
    for unit in units:
        for module in unit.modules():
            if isinstance(module, Attention):
                module.rotation = direct_rotate


def direct_rotate(q_BSHK: Tensor, k_BSGK: Tensor, cos_BS1F: Tensor, sin_BS1F: Tensor) -> tuple[Tensor, Tensor]:
    """`model.attention.Rotation`: computed in the tables' dtype, returned in the dtype of queries and keys."""
    out: tuple[Tensor, Tensor] = _Rotation.apply(q_BSHK, k_BSGK, cos_BS1F, sin_BS1F)  # type: ignore[no-untyped-call]
    return out


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turned(q, k, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, of_q: Tensor, of_k: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return *_turned(of_q, of_k, cos, sin, -1), None, None


def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sense: int) -> tuple[Tensor, Tensor]:
    """Both by their angles, or for `sense` -1 back."""
    cos_of_both = torch.cat((cos, cos), dim=-1)
    return _turned_by(q, cos_of_both, sin, sense), _turned_by(k, cos_of_both, sin, sense)


def _turned_by(x: Tensor, cos_of_both: Tensor, sin: Tensor, sense: int) -> Tensor:
    out = torch.empty(x.shape, dtype=sin.dtype, device=x.device)
    torch.mul(x, cos_of_both, out=out)
    (first, second), (to_first, to_second) = x.to(sin.dtype).chunk(2, dim=-1), out.chunk(2, dim=-1)
    to_first.addcmul_(second, sin, value=-sense)
    to_second.addcmul_(first, sin, value=sense)
    return out.to(x.dtype)
