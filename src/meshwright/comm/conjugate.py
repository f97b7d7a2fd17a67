"""The conjugate pairs of tensor and expert parallelism: each collective with the one that its gradient takes.

    f    copied        identity forward        all-reduce backward         (N, D) -> (N, D)
    f*   summed        all-reduce forward      identity backward           (N, D) -> (N, D)
    g    gathered      all-gather forward      reduce-scatter backward     (N/T, D) -> (N, D)
    g*   scattered     reduce-scatter forward  all-gather backward         (N, D) -> (N/T, D)
         exchanged     all-to-all forward      the same, the other way     (N, D) -> (M, D)

Between f and f* (g and g*) every rank works on features of its own, for all tokens. Sources: Shoeybi et al. 2019
(arXiv:1909.08053, section 3) and Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.comm.custom import all_gather, all_reduce, begin_sum, exchanged, own_chunk, reduce_scatter, size_of

__all__ = ["copied", "exchanged", "gathered", "scattered", "scattered_beside", "summed"]


def copied(x: Tensor, group: str) -> Tensor:
    """f: identity forward, all-reduce backward; (N, D) -> (N, D)."""
    out: Tensor = _copied(x, group)
    return out


@torch.library.custom_op("meshwright::copied", mutates_args=())
def _copied(x: Tensor, group: str) -> Tensor:
    return x.clone()


@_copied.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("meshwright::scattered_beside", mutates_args=())
def _scattered_beside(x: Tensor, beside: Tensor, group: str) -> Tensor:
    return begin_sum(x.contiguous(), group, scatter=True)().add_(own_chunk(beside, group))


@_scattered_beside.register_fake
def _(x: Tensor, beside: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape[0] // size_of(group), *x.shape[1:])


def summed(x: Tensor, group: str) -> Tensor:
    """f*: all-reduce forward, identity backward; (N, D) -> (N, D)."""
    out: Tensor = all_reduce(x, group)
    return out


def gathered(x: Tensor, group: str) -> Tensor:
    """g: all-gather forward, reduce-scatter backward; (N/T, D) -> (N, D)."""
    out: Tensor = all_gather(x, group)
    return out


def scattered(x: Tensor, group: str) -> Tensor:
    """g*: reduce-scatter forward, all-gather backward; (N, D) -> (N/T, D)."""
    out: Tensor = reduce_scatter(x, group)
    return out


def scattered_beside(x: Tensor, beside: Tensor, group: str) -> Tensor:
    """g*, and beside it the own chunk of what every rank has whole: (N, D), (N, D) -> (N/T, D).

    One all-gather backward serves both, so the gradient of `beside` is whole on every rank.
    """
    out: Tensor = _scattered_beside(x, beside, group)
    return out


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.group = inputs[-1]


_copied.register_autograd(lambda ctx, g: (all_reduce(g, ctx.group), None), setup_context=_keep_group)
all_reduce.register_autograd(lambda ctx, g: (g, None), setup_context=_keep_group)
all_gather.register_autograd(lambda ctx, g: (reduce_scatter(g, ctx.group), None), setup_context=_keep_group)
reduce_scatter.register_autograd(lambda ctx, g: (all_gather(g, ctx.group), None), setup_context=_keep_group)


def _beside_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
    whole = all_gather(g, ctx.group)
    return whole, whole.clone(), None  # the outputs of a graph may not share memory


_scattered_beside.register_autograd(_beside_backward, setup_context=_keep_group)


def _keep_splits(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ctx.sent, ctx.received, _, ctx.group = inputs
    ctx.rows = len(x)


def _exchanged_back(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
    """Rows that were not sent have no gradient."""
    return exchanged(g, ctx.received, ctx.sent, ctx.rows, ctx.group), None, None, None, None


exchanged.register_autograd(_exchanged_back, setup_context=_keep_splits)
