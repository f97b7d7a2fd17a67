"""How a selective block multiplies: products of one input that is made again in backward, by what they are cut over.

                forward                          backward
    plain       y = x W^T + b                    dx = g W
    column      y = x W^T + b                    dx = g W, its sum over the tensor axis launched, then awaited
    row         y = x W^T, summed [scattered]    [g gathered]  dx = g W

What is launched runs beside the making of x. A recipe makes local tensors from local ones, so no form sends more than
the products of `tensor_direct` do; the bias of a row product is added outside, once, to the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.parallel.split import input_gradient
from meshwright.parallel.tensor_linear import begin_input_gradient, begin_row_gradient, column_forward, row_forward

__all__ = ["PLAIN", "Begun", "Form", "column_form", "row_form"]

Begun = tuple[Sequence[Tensor], Callable[[], Tensor]]
"""(cotangents (N, O_i) for the weight products, what ends the gradient of their input (N, I))."""


@dataclass(frozen=True, slots=True)
class Form:
    """`forward` (x (N, I), weights (O_i, I), biases) -> (N, O_i) each; `backward` (cotangents, weights) begins."""

    forward: Callable[[Tensor, Sequence[Tensor], Sequence[Tensor | None]], tuple[Tensor, ...]]
    backward: Callable[[Sequence[Tensor], Sequence[Tensor]], Begun]


def _plain(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(nn.functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def _begin_plain(gs: Sequence[Tensor], weights: Sequence[Tensor]) -> Begun:
    return gs, partial(input_gradient, gs, weights)


PLAIN = Form(_plain, _begin_plain)


def column_form(group: str) -> Form:
    """f over a registered tensor group: identity forward, all-reduce backward."""

    def forward(x_ND: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        added = [bias for bias in biases if bias is not None]
        y_NO, _ = column_forward(x_ND, weights, added, group, False)
        return tuple(torch.split(y_NO, [weight.shape[0] for weight in weights], dim=1))

    def backward(gs: Sequence[Tensor], weights: Sequence[Tensor]) -> Begun:
        return gs, begin_input_gradient(gs, weights, group, False)

    return Form(forward, backward)


def row_form(group: str, sequence: bool) -> Form:
    """f* over a registered tensor group: all-reduce forward, identity backward; g* under `sequence`."""

    def forward(x_NI: Tensor, weights: Sequence[Tensor], _: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        (weight,) = weights
        return (row_forward(x_NI, weight, group, sequence),)

    def backward(gs: Sequence[Tensor], weights: Sequence[Tensor]) -> Begun:
        (g,), (weight,) = gs, weights
        g_ND, end = begin_row_gradient(g, weight, group, sequence)
        return [g_ND], end

    return Form(forward, backward)
