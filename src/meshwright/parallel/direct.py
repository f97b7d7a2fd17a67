"""Forwards of an eager run without a tensor axis, whose weight gradients go straight to their place.

linear    y = x W^T + b       W += g^T x                      at once or stashed, see `split`
look-up   rows of a table     W[row] += g                     a token touches one row, not a gradient as large as W
loss      of x W^T            p = softmax, in the memory of the logits; W += (p - label)^T x

N  tokens      D  hidden      V  vocabulary      I, O  inputs and outputs of a linear
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.model.attention import Attention
from meshwright.model.decoder import Embedding, Head
from meshwright.model.loss import IGNORED, loss, share
from meshwright.model.mlp import MLP, GatedMLP
from meshwright.model.rows import Rows
from meshwright.parallel.runs import token_runs
from meshwright.parallel.split import Place, WeightProducts, input_gradient

__all__ = ["apply_direct"]

_CHUNK_ELEMENTS = 1 << 17  # logits worked on at a time: what a core's second cache holds


def apply_direct(units: Iterable[nn.Module], products: WeightProducts) -> None:
    """Replace the forwards of these units' linears, look-ups and losses, in place, once.

    Raises ValueError for a unit whose forwards were replaced before.
    """
    direct = _Direct(products)
    for unit in units:
        for module in unit.modules():
            if isinstance(module, nn.Linear):
                if "forward" in vars(module):
                    raise ValueError("the linears of this unit have been replaced already")
                module.forward = _Forward(module, direct)  # type: ignore[assignment]  # of one module
            elif isinstance(module, Attention | MLP | GatedMLP):
                module.products = direct.products
            elif isinstance(module, Embedding):
                module.lookup = direct.look_up
            elif isinstance(module, Head):
                module.criterion = direct.loss


class _Direct:
    """The forwards; what is not trained takes the plain one."""

    def __init__(self, products: WeightProducts) -> None:
        self._products = products

    def linear(self, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """(N, I) -> (N, O)."""
        (out,) = self._products_of(x_NI, [weight_OI], [bias_O])
        return out

    def products(self, x_ND: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """`model.products.Products`: of one input, so that its gradient adds up in one memory."""
        return self._products_of(x_ND, [each.weight for each in linears], [each.bias for each in linears])

    def look_up(self, tokens_BS: Tensor, rows: Rows, weight_VD: Tensor, positions: Tensor | None) -> Tensor:
        """`model.decoder.Lookup`."""
        x_BSD = self._rows_of(weight_VD, tokens_BS)
        if positions is not None:
            x_BSD = x_BSD + self._rows_of(positions, rows.positions)
        return x_BSD.flatten(0, 1)

    def loss(self, x_ND: Tensor, weight_VD: Tensor, labels_BS: Tensor, count: Tensor) -> Tensor:
        """`model.decoder.Criterion`."""
        place = self._products.place(weight_VD)
        if place is None or torch.finfo(x_ND.dtype).bits < 32:
            return loss(self.linear(x_ND, weight_VD), labels_BS, count)
        total: Tensor = _Loss.apply(x_ND, weight_VD, labels_BS.flatten(), self._products, place)  # type: ignore[no-untyped-call]
        return share(total, count)

    def _products_of(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
        places = [self._products.place(weight) for weight in weights]
        if None in places:
            return [nn.functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        out: tuple[Tensor, ...] = _Linears.apply(x, self._products, places, *weights, *biases)  # type: ignore[no-untyped-call]
        return out

    def _rows_of(self, table: Tensor, index: Tensor) -> Tensor:
        place = self._products.place(table)
        if place is None:
            return nn.functional.embedding(index, table)
        out: Tensor = _LookUp.apply(index, table, place)  # type: ignore[no-untyped-call]
        return out


class _Forward:
    """The forward of one replaced linear."""

    def __init__(self, linear: nn.Linear, direct: _Direct) -> None:
        self._linear, self._direct = linear, direct

    def __call__(self, x_NI: Tensor) -> Tensor:
        return self._direct.linear(x_NI, self._linear.weight, self._linear.bias)


class _Linears(torch.autograd.Function):
    """Products of one input: one step of autograd for all of them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, products: WeightProducts, places: Sequence[Place], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = tensors[: len(places)], tensors[len(places) :]
        ctx.save_for_backward(x, *weights)
        ctx.products, ctx.places = products, places
        return tuple(
            nn.functional.linear(x, weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
            if weight is not None
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        for place, g in zip(ctx.places, gradients, strict=True):
            ctx.products.add(place, g, x)
        dx = input_gradient(gradients, weights) if ctx.needs_input_grad[0] else None
        biased = ctx.needs_input_grad[3 + len(weights) :]
        if True not in biased:
            return dx, None, None, *[None] * (2 * len(weights))
        sums = (g.sum(0) if needed else None for g, needed in zip(gradients, biased, strict=True))
        return dx, None, None, *[None] * len(weights), *sums


class _LookUp(torch.autograd.Function):
    """A unit that begins with a look-up has no input gradient: all of its backward is weight work already."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, table: Tensor, place: Place) -> Tensor:
        ctx.save_for_backward(index)
        ctx.place = place
        return nn.functional.embedding(index, table)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, None]:
        (index,) = ctx.saved_tensors
        ctx.place.write_rows(index.flatten(), g.flatten(0, -2))
        return None, None, None


class _Loss(torch.autograd.Function):
    """The sum of token losses: the logits become exp(l - max), then the gradient of the logits, in one memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, products: WeightProducts, place: Place) -> Tensor:
        raised_NV = torch.mm(x, weight.t())
        sums_N, of_label_N = x.new_empty(x.shape[0]), x.new_empty(x.shape[0])
        trained_N = labels != IGNORED
        known_N = labels.where(trained_N, 0)
        for low, high in token_runs(x.shape[0], weight.shape[0], _CHUNK_ELEMENTS):
            logits = raised_NV[low:high]
            logits.sub_(logits.amax(1, keepdim=True))
            of_label_N[low:high] = logits.gather(1, known_N[low:high, None])[:, 0]
            torch.sum(logits.exp_(), 1, out=sums_N[low:high])
        ctx.save_for_backward(x, weight, known_N, trained_N, sums_N)
        ctx.products, ctx.place, ctx.raised = products, place, raised_NV
        return (sums_N.log() - of_label_N).masked_fill_(~trained_N, 0).sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight, known_N, trained_N, sums_N = ctx.saved_tensors
        gradient_NV, ctx.raised = ctx.raised, None
        each_N = trained_N * g
        factor_N = each_N / sums_N
        for low, high in token_runs(x.shape[0], weight.shape[0], _CHUNK_ELEMENTS):
            gradient_NV[low:high].mul_(factor_N[low:high, None])
        gradient_NV.scatter_add_(1, known_N[:, None], -each_N[:, None])
        dx = torch.mm(gradient_NV, weight)
        ctx.products.add(ctx.place, gradient_NV, x)
        return dx, None, None, None, None
