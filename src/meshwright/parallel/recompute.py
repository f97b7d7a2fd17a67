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
from meshwright.model.rows import Rows
from meshwright.parallel.split import WeightProducts, input_gradient

__all__ = ["Recipe", "apply_selective"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What products read, and how to make it from kept tensors; `parameters` are those that `make` reads."""

    make: Callable[..., Tensor]
    parameters: tuple[nn.Parameter, ...] = ()


def apply_selective(units: Iterable[nn.Module], products: WeightProducts) -> None:
    """Replace the forward of every block among `units`, in place, once. A second application raises ValueError."""
    for unit in units:
        if isinstance(unit, Block):
            if "forward" in vars(unit):
                raise ValueError("the forward of this block has been replaced already")
            unit.forward = _SelectiveBlock(unit, products)  # type: ignore[method-assign]  # of one module


class _SelectiveBlock:
    """The forward of one block, product by product; what lies between them is `Attention.mixed`, `MLP.widened`."""

    def __init__(self, block: Block, products: WeightProducts) -> None:
        self._block, self._products = block, products

    def __call__(self, x_ND: Tensor, rows: Rows) -> Tensor:
        """(N, D) -> (N, D)."""
        block = self._block
        x_ND = x_ND + block.attention_dropout(self._attention(x_ND, rows), rows)
        y_ND: Tensor = x_ND + block.mlp_dropout(self._mlp(x_ND), rows)
        return y_ND

    def _attention(self, x_ND: Tensor, rows: Rows) -> Tensor:
        attention = self._block.attention
        normed = _recipe_of(self._block.attention_norm)
        heads = self._multiply(normed, (attention.query, attention.key, attention.value), x_ND)
        (y_ND,) = self._multiply(_core(attention, rows), (attention.output,), *heads)
        return y_ND

    def _mlp(self, x_ND: Tensor) -> Tensor:
        mlp, normed = self._block.mlp, _recipe_of(self._block.mlp_norm)
        assert isinstance(mlp, MLP | GatedMLP)
        wide = self._multiply(normed, mlp.inward, x_ND)
        (y_ND,) = self._multiply(Recipe(mlp.widened), (mlp.down,), *wide)
        return y_ND

    def _multiply(self, recipe: Recipe, linears: Sequence[nn.Linear], *kept: Tensor) -> tuple[Tensor, ...]:
        biases = tuple(bias for linear in linears for bias in _bias(linear))
        inputs = (*kept, *recipe.parameters, *biases)
        out: tuple[Tensor, ...] = _Products.apply(recipe, linears, self._products, len(kept), *inputs)  # type: ignore[no-untyped-call]
        return out


def _bias(linear: nn.Linear) -> tuple[Tensor, ...]:
    bias: Tensor | None = linear.bias
    return () if bias is None else (bias,)


def _recipe_of(norm: nn.Module) -> Recipe:
    return Recipe(norm, tuple(norm.parameters()))


def _core(attention: Attention, rows: Rows) -> Recipe:
    """Rotation and attention, with the norms of heads."""
    norms = (*attention.query_norm.parameters(), *attention.key_norm.parameters())
    return Recipe(partial(attention.mixed, rows=rows), norms)


class _Products(torch.autograd.Function):
    """y_i = recipe(kept) W_i^T + b_i for every linear; keeps `kept` alone.

    Inputs after the first four are what autograd follows: kept tensors, the recipe's parameters, biases.
    """

    @staticmethod
    def forward(
        ctx: Any,
        recipe: Recipe,
        linears: Sequence[nn.Linear],
        products: WeightProducts,
        num_kept: int,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.recipe, ctx.linears, ctx.products = recipe, linears, products
        kept = inputs[:num_kept]
        ctx.save_for_backward(*kept)
        x = recipe.make(*kept)
        return tuple(nn.functional.linear(x, linear.weight, linear.bias) for linear in linears)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        recipe, linears = ctx.recipe, ctx.linears
        kept = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            x = recipe.make(*kept)
        read = x.detach()
        dx = input_gradient(gradients, [linear.weight for linear in linears])
        for g, linear in zip(gradients, linears, strict=True):
            place = ctx.products.place(linear.weight)
            if place is not None:
                ctx.products.add(place, g, read)
        trained = [each for each in recipe.parameters if each.requires_grad]
        found = iter(torch.autograd.grad(x, [*kept, *trained], dx))
        of_kept = [next(found) for _ in kept]
        of_parameters = [next(found) if each.requires_grad else None for each in recipe.parameters]
        biases = [(g, each.bias) for g, each in zip(gradients, linears, strict=True) if each.bias is not None]
        of_biases = [g.sum(0) if bias.requires_grad else None for g, bias in biases]
        return None, None, None, None, *of_kept, *of_parameters, *of_biases
