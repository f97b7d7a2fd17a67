"""Rotation by the position as one step of autograd, in the memory of its output.

    forward     (a, b) -> (a cos - b sin, b cos + a sin)         the halves a, b of a head's elements
    backward    the same by the negative angle; only the tables are kept, which are alive anyway

B  sequences      S  tokens of each      H  heads      K  elements of a head      F = K / 2  frequencies
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.model.attention import Attention

__all__ = ["apply_rotation", "direct_rotate"]


def apply_rotation(units: Iterable[nn.Module]) -> None:
    """Replace the rotation of every attention of these units, in place."""
    for unit in units:
        for module in unit.modules():
            if isinstance(module, Attention):
                module.rotation = direct_rotate


def direct_rotate(x_BSHK: Tensor, cos_BS1F: Tensor, sin_BS1F: Tensor) -> Tensor:
    """`model.attention.Rotation`: computed in the tables' dtype, returned in x's."""
    out: Tensor = _Rotation.apply(x_BSHK, cos_BS1F, sin_BS1F)  # type: ignore[no-untyped-call]
    return out


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(g, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sense: int) -> Tensor:
    out = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    torch.mul(x, torch.cat((cos, cos), dim=-1), out=out)
    (first, second), (to_first, to_second) = x.to(cos.dtype).chunk(2, dim=-1), out.chunk(2, dim=-1)
    to_first.addcmul_(second, sin, value=-sense)
    to_second.addcmul_(first, sin, value=sense)
    return out.to(x.dtype)
