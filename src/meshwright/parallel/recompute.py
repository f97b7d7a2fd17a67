"""Selective recomputation: a product keeps the recipe of its input instead of the input.

What a block keeps for backward is mostly what products read, and most of that is cheap to make again from something
kept anyway: a norm from the stream, the attention core from queries, keys and values, the gated product from its two
factors (Korthikanti et al. 2023, arXiv:2205.05198, section 5, carried from attention to all that is wide and cheap).

    kept     made again in backward                  for the products
    x_ND     attention_norm(x)                       query, key, value
    q k v    rotation, attention                     output
    x_ND     mlp_norm(x)                             gate, up
    gate up  activation(gate) * up                   down

No product runs twice: backward makes the recipe's output, uses it for the weight products, and carries the gradient of
the output through the recipe to what was kept. Dropout lies outside recipes and keeps its mask, one byte an element.

On a tensor axis recipes are local: each rank makes its own heads and columns again, beside the sum of the input's
gradient. Under sequence parallel the first and third products read a gathered norm. They keep it as they do without
recomputation, for to make it again would send it again; on a context axis attention keeps what it made for the same
reason.

Routed feed-forwards are left as they are: what their experts read is made by sending and sorting.

Full recomputation needs none of this: there the program itself runs a unit again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.model.attention import Attention
from meshwright.model.decoder import Block
from meshwright.model.mlp import MLP, GatedMLP
from meshwright.model.moe import RoutedMLP
from meshwright.model.rows import Rows
from meshwright.parallel.recompute_forms import PLAIN, Form, column_form, row_form
from meshwright.parallel.split import WeightProducts
from meshwright.parallel.tensor import TensorAxis

__all__ = ["Recipe", "apply_selective"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What products read, and how to make it from kept tensors; `parameters` are those that `make` reads."""

    make: Callable[..., Tensor]
    parameters: tuple[nn.Parameter, ...] = ()


def apply_selective(
    units: Iterable[nn.Module], products: WeightProducts, axis: TensorAxis | None = None, *, keeps_core: bool = False
) -> None:
    """Replace the forward of every block among `units`, in place, once. A second application raises ValueError.

    `axis`: the tensor axis that has been applied to these blocks; `keeps_core`: their attention sends, and is not made
    again.
    """
    for unit in units:
        if isinstance(unit, Block):
            if "forward" in vars(unit):
                raise ValueError("the forward of this block has been replaced already")
            unit.forward = _SelectiveBlock(unit, products, axis, keeps_core)  # type: ignore[method-assign]  # of one module


class _SelectiveBlock:
    """The forward of one block, product by product; what lies between them is `Attention.mixed`, `MLP.widened`."""

    def __init__(self, block: Block, products: WeightProducts, axis: TensorAxis | None, keeps_core: bool) -> None:
        self._block, self._products, self._axis, self._keeps_core = block, products, axis, keeps_core
        self._column = PLAIN if axis is None else column_form(axis.group)
        self._row = PLAIN if axis is None else row_form(axis.group, axis.sequence)

    def __call__(self, x_ND: Tensor, rows: Rows) -> Tensor:
        """(N, D) -> (N, D), or (N/T, D) both under sequence parallel."""
        block = self._block
        x_ND = x_ND + block.attention_dropout(self._attention(x_ND, rows), rows)
        y_ND: Tensor = x_ND + block.mlp_dropout(self._mlp(x_ND, rows), rows)
        return y_ND

    def _attention(self, x_ND: Tensor, rows: Rows) -> Tensor:
        attention = self._block.attention
        heads = self._inward(self._block.attention_norm, (attention.query, attention.key, attention.value), x_ND)
        if self._keeps_core:
            query, key, value = heads
            y_ND: Tensor = attention.output(attention.mixed(query, key, value, rows))
            return y_ND
        return self._outward(_core(attention, rows), attention.output, *heads)

    def _mlp(self, x_ND: Tensor, rows: Rows) -> Tensor:
        mlp = self._block.mlp
        if isinstance(mlp, RoutedMLP):
            routed_ND: Tensor = mlp(self._block.mlp_norm(x_ND), rows)
            return routed_ND
        assert isinstance(mlp, MLP | GatedMLP)
        wide = self._inward(self._block.mlp_norm, mlp.inward, x_ND)
        return self._outward(Recipe(mlp.widened), mlp.down, *wide)

    def _inward(self, norm: nn.Module, linears: Sequence[nn.Linear], x_ND: Tensor) -> Sequence[Tensor]:
        if self._axis is not None and self._axis.sequence:
            return self._axis.products(norm(x_ND), linears)
        recipe = Recipe(norm, tuple(norm.parameters()))
        return self._multiply(recipe, self._column, linears, [linear.bias for linear in linears], x_ND)

    def _outward(self, recipe: Recipe, linear: nn.Linear, *kept: Tensor) -> Tensor:
        """`linear`, or the `RowLinear` in its place."""
        bias: Tensor | None = linear.bias
        if self._axis is None:
            (y_ND,) = self._multiply(recipe, self._row, (linear,), (bias,), *kept)
            return y_ND
        (y_ND,) = self._multiply(recipe, self._row, (linear,), (None,), *kept)
        return y_ND if bias is None else y_ND + bias

    def _multiply(
        self, recipe: Recipe, form: Form, linears: Sequence[nn.Linear], biases: Sequence[Tensor | None], *kept: Tensor
    ) -> tuple[Tensor, ...]:
        weights = [linear.weight for linear in linears]
        inputs = (*kept, *recipe.parameters, *biases)
        out: tuple[Tensor, ...] = _Products.apply(recipe, form, weights, self._products, len(kept), *inputs)  # type: ignore[no-untyped-call]
        return out


def _core(attention: Attention, rows: Rows) -> Recipe:
    """Rotation and attention, with the norms of heads."""
    norms = (*attention.query_norm.parameters(), *attention.key_norm.parameters())
    return Recipe(partial(attention.mixed, rows=rows), norms)


class _Products(torch.autograd.Function):
    """y_i = recipe(kept) W_i^T + b_i for every weight, by `form`; keeps `kept` alone.

    Inputs after the first five are what autograd follows: kept tensors, the recipe's parameters, biases (or None).
    """

    @staticmethod
    def forward(
        ctx: Any,
        recipe: Recipe,
        form: Form,
        weights: Sequence[Tensor],
        products: WeightProducts,
        num_kept: int,
        *inputs: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.recipe, ctx.form, ctx.weights, ctx.products = recipe, form, weights, products
        ctx.biased = ctx.needs_input_grad[-len(weights) :]
        kept = inputs[:num_kept]
        ctx.save_for_backward(*kept)
        return form.forward(recipe.make(*kept), weights, inputs[-len(weights) :])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        recipe, weights = ctx.recipe, ctx.weights
        cotangents, end = ctx.form.backward(gradients, weights)
        kept = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            x = recipe.make(*kept)
        read = x.detach()
        for g, weight in zip(cotangents, weights, strict=True):
            place = ctx.products.place(weight)
            if place is not None:
                ctx.products.add(place, g, read)
        trained = [each for each in recipe.parameters if each.requires_grad]
        found = iter(torch.autograd.grad(x, [*kept, *trained], end()))
        of_kept = [next(found) for _ in kept]
        of_parameters = [next(found) if each.requires_grad else None for each in recipe.parameters]
        of_biases = [g.sum(0) if needed else None for g, needed in zip(gradients, ctx.biased, strict=True)]
        return None, None, None, None, None, *of_kept, *of_parameters, *of_biases
