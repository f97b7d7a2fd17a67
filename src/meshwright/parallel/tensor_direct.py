"""Tensor-parallel products of an eager run: weight gradients are not carried by autograd but go where they belong.

    backward of a column product      launch the sum of g W | products g^T x, at once or stashed | await the sum

So the collective hides behind products of its own unit, and a split backward leaves exactly the products. Kernels are
those of `tensor_linear` and `tensor_vocabulary`; where the products go is `split.WeightProducts`' affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.model.loss import share
from meshwright.parallel.split import WeightProducts
from meshwright.parallel.tensor_linear import begin_input_gradient, begin_row_gradient, column_forward, row_forward
from meshwright.parallel.tensor_vocabulary import begin_loss_input_gradient, loss_forward, loss_gradient_

__all__ = ["direct_column", "direct_loss", "direct_row"]


def direct_column(
    x_ND: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    group: str,
    sequence: bool,
    products: WeightProducts,
) -> Sequence[Tensor]:
    """As `tensor_linear.column_product`: f, or g under `sequence`."""
    out: tuple[Tensor, ...] = _Column.apply(x_ND, group, sequence, products, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    return out


def direct_row(x_NI: Tensor, weight_DI: Tensor, group: str, sequence: bool, products: WeightProducts) -> Tensor:
    """As `tensor_linear.row_product`: f*, or g* under `sequence`."""
    out: Tensor = _Row.apply(x_NI, weight_DI, group, sequence, products)  # type: ignore[no-untyped-call]
    return out


def direct_loss(
    x_ND: Tensor, weight: Tensor, labels_BS: Tensor, count: Tensor, held: tuple[int, int], group: str,
    sequence: bool, products: WeightProducts,
) -> Tensor:  # fmt: skip
    """As `tensor_vocabulary.vocabulary_loss`: f, or g under `sequence`."""
    total: Tensor = _Loss.apply(x_ND, weight, labels_BS.flatten(), held, group, sequence, products)  # type: ignore[no-untyped-call]
    return share(total, count)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: str, sequence: bool, products: WeightProducts, num_weights: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        weights, biases = tensors[:num_weights], tensors[num_weights:]
        y_NO, x_ND = column_forward(x, weights, biases, group, sequence)
        ctx.save_for_backward(x_ND, *weights)
        ctx.group, ctx.sequence, ctx.products, ctx.num_biases = group, sequence, products, len(biases)
        ctx.places = [products.place(weight) for weight in weights]
        return tuple(torch.split(y_NO, [weight.shape[0] for weight in weights], dim=1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gs: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, *weights = ctx.saved_tensors
        end = begin_input_gradient(gs, weights, ctx.group, ctx.sequence)
        for place, g in zip(ctx.places, gs, strict=True):
            if place is not None:
                ctx.products.add(place, g, x_ND)
        of_biases = [g.sum(0) for g in gs[: ctx.num_biases]]
        return end(), None, None, None, None, *(None for _ in weights), *of_biases


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: str, sequence: bool, products: WeightProducts) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence, ctx.products, ctx.place = group, sequence, products, products.place(weight)
        return row_forward(x, weight, group, sequence)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g_ND, end = begin_row_gradient(g, weight, ctx.group, ctx.sequence)
        if ctx.place is not None:
            ctx.products.add(ctx.place, g_ND, x)
        return end(), None, None, None, None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, held: tuple[int, int], group: str, sequence: bool,
        products: WeightProducts,
    ) -> Tensor:  # fmt: skip
        total, x_ND, raised, factor = loss_forward(x, weight, labels, held, group, sequence)
        ctx.save_for_backward(x_ND, weight, labels, raised, factor)
        ctx.held, ctx.group, ctx.sequence, ctx.products = held, group, sequence, products
        ctx.place = products.place(weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight, labels, raised, factor = ctx.saved_tensors
        size = ctx.held[1]
        loss_gradient_(g, labels, raised, factor, ctx.held)
        end = begin_loss_input_gradient(raised, weight, size, ctx.group, ctx.sequence)
        if ctx.place is not None:
            ctx.products.add(ctx.place, raised, x_ND)
        return end(), None, None, None, None, None, None
