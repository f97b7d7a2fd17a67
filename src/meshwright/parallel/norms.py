"""RMSNorm on a CPU: one step of autograd that keeps x and the scale, as CUDA's kernel does.

    r = 1 / sqrt(mean(x^2) + eps)      y = x r w

    dx = r g w - x r^3 mean(g w x)     dw = sum over rows of g x r

torch composes its own of primitives there, which pass over memory several times and keep the normalised input as well.
Its backward of LayerNorm, given a mean of zero, is the one above less r mean(g w) in every row, so that is added again.
All of it is computed in float32 at least and rounded once, in the order of `torch.nn.functional.rms_norm`.

N  rows      D  elements of a row      w  (D,) gain
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["apply_norms"]

_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


def apply_norms(units: Iterable[nn.Module]) -> None:
    """Replace the forward of every RMSNorm of these units, in place, once. A second application raises ValueError."""
    for unit in units:
        for module in unit.modules():
            if isinstance(module, nn.RMSNorm):
                if "forward" in vars(module):
                    raise ValueError("the norms of this unit have been replaced already")
                module.forward = _Forward(module)  # type: ignore[method-assign]  # of one module


class _Forward:
    """The forward of one replaced norm."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        self._norm, self._plain = norm, norm.forward

    def __call__(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if x.device.type != "cpu":
            return self._plain(x)
        out: Tensor = _RMSNorm.apply(x, self._norm.weight, self._norm.eps)  # type: ignore[no-untyped-call]
        return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        precise = torch.promote_types(x.dtype, torch.float32)
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=precise)
        scale = norms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, weight_D)
        y: Tensor = (x * scale).mul_(weight_D)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, scale, weight_D = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        precise = x.dtype is scale.dtype is weight_D.dtype
        g_, x_, w_D = (g, x, weight_D) if precise else (each.to(scale.dtype) for each in (g, x, weight_D))
        dx, dw_D, _ = _layer_norm_backward(
            g_, x_, w_D.shape, torch.zeros_like(scale), scale, w_D, None, (of_x, of_weight, False)
        )
        if of_x:
            sums = torch.matmul(g_, w_D).unsqueeze_(-1)
            dx.add_(sums.mul_(scale), alpha=1 / x.shape[-1])
        if precise:
            return dx, dw_D, None
        return dx.to(x.dtype) if of_x else None, dw_D.to(weight_D.dtype) if of_weight else None, None
