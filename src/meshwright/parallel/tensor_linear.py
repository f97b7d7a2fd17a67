"""Column- and row-parallel products, each with its collective in one operation.

    N  tokens of the tensor group      D  hidden      O  outputs held here      I  inputs held here      T  ranks

                 forward                                     backward
    column       [gather x]  y = x W^T                       dx = g W, its sum launched | dW = g^T x | sum awaited
    row          y = x W^T, summed [scattered]               [gather g]  dx = g W   dW = g^T x

In brackets: under sequence parallel, where the stream is (N/T, D). Weights that lie behind one another in a bucket
(query, key, value; gate, up) are one product. What is gathered or scattered may go round in chunks, under the product
of others: see `comm.ring`.

Custom operations, whose gradients autograd carries, serve compiled graphs; `tensor_direct` is the eager form of the
same kernels, whose weight products are written where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.custom import gathered, size_of
from meshwright.comm.ring import begin_leaving, entering, goes_round
from meshwright.comm.torch_private import storage_address
from meshwright.parallel.split import input_gradient

__all__ = [
    "begin_input_gradient", "begin_row_gradient", "column_forward", "column_product", "row_forward", "row_product",
]  # fmt: skip


def column_product(
    x_ND: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], group: str, sequence: bool
) -> Sequence[Tensor]:
    """Products of one input with weights (O_i, D), plus biases (O_i,) or none: -> (N, O_i) each.

    f, or g under `sequence`: x is (N/T, D) then. Identity or all-gather forward; all-reduce or reduce-scatter of the
    input's gradient backward, while the weights' gradient is computed.
    """
    y_NO, _ = _column(x_ND, list(weights), list(biases), group, sequence)
    return torch.split(y_NO, [weight.shape[0] for weight in weights], dim=1)


def row_product(x_NI: Tensor, weight_DI: Tensor, group: str, sequence: bool) -> Tensor:
    """(N, I) -> (N, D), or (N/T, D) under `sequence`: each rank's part of the inputs, summed.

    f* or g*: all-reduce or reduce-scatter forward; identity or all-gather of the cotangent backward.
    """
    out: Tensor = _row(x_NI, weight_DI, group, sequence)
    return out


def column_forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], group: str, sequence: bool
) -> tuple[Tensor, Tensor]:
    """x (N, D), or (N/T, D) under `sequence` -> (y (N, O), x whole)."""
    x_ND, rows = entering(x, group, sequence)
    runs = _runs(weights)
    y_NO = x.new_empty(x_ND.shape[0], sum(run.shape[0] for run in runs))
    for low, high in rows:
        first = 0
        for run in runs:
            torch.mm(x_ND[low:high], run.t(), out=y_NO[low:high, first : first + run.shape[0]])
            first += run.shape[0]
    if biases:
        y_NO.add_(torch.cat(list(biases)))
    return y_NO, x_ND


def begin_input_gradient(
    gs: Sequence[Tensor], weights: Sequence[Tensor], group: str, sequence: bool
) -> Callable[[], Tensor]:
    """Cotangents (N, O_i) of the products -> the launched sum of the input's gradient: (N, D) or (N/T, D)."""

    def product(low: int, high: int) -> Tensor:
        return input_gradient([g[low:high] for g in gs], weights)

    return begin_leaving(product, gs[0].shape[0], group, sequence)


def row_forward(x_NI: Tensor, weight_DI: Tensor, group: str, sequence: bool) -> Tensor:
    """(N, I) -> (N, D), or (N/T, D) under `sequence`."""

    def product(low: int, high: int) -> Tensor:
        return torch.mm(x_NI[low:high], weight_DI.t())

    return begin_leaving(product, x_NI.shape[0], group, sequence)()


def begin_row_gradient(g: Tensor, weight_DI: Tensor, group: str, sequence: bool) -> tuple[Tensor, Callable[[], Tensor]]:
    """Cotangent (N, D), or (N/T, D) under `sequence` -> (whole (N, D), what gives the gradient of the input (N, I)).

    What goes round is multiplied as it arrives, anything else when it is asked for: so it lives less long.
    """
    if not (sequence and goes_round(group)):
        g_ND = gathered(g, group) if sequence else g
        return g_ND, partial(torch.mm, g_ND, weight_DI)
    g_ND, rows = entering(g, group, sequence)
    dx_NI = g.new_empty(g_ND.shape[0], weight_DI.shape[1])
    for low, high in rows:
        torch.mm(g_ND[low:high], weight_DI, out=dx_NI[low:high])
    return g_ND, lambda: dx_NI


@torch.library.custom_op("meshwright::column", mutates_args=())
def _column(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], group: str, sequence: bool
) -> tuple[Tensor, Tensor]:
    """-> (y (N, O), the gathered x (N, D) that backward needs; empty where x is whole)."""
    y_NO, x_ND = column_forward(x, weights, biases, group, sequence)
    return y_NO, x_ND if sequence else x.new_empty(0)


@torch.library.custom_op("meshwright::column_backward", mutates_args=())
def _column_backward(
    g: Tensor, x: Tensor, weights: list[Tensor], group: str, sequence: bool, biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """g (N, O), x (N, D) -> (dx (N, D) or (N/T, D), dW (O, D), db (O,) or empty)."""
    runs = _runs(weights)
    end = begin_input_gradient(torch.split(g, [run.shape[0] for run in runs], dim=1), runs, group, sequence)
    dw_OD = torch.mm(g.t(), x)
    db_O = g.sum(0) if biased else g.new_empty(0)
    return end(), dw_OD, db_O


@torch.library.custom_op("meshwright::row", mutates_args=())
def _row(x: Tensor, weight: Tensor, group: str, sequence: bool) -> Tensor:
    return row_forward(x, weight, group, sequence)


@torch.library.custom_op("meshwright::row_backward", mutates_args=())
def _row_backward(g: Tensor, x: Tensor, weight: Tensor, group: str, sequence: bool) -> tuple[Tensor, Tensor]:
    """g (N, D) or (N/T, D) -> (dx (N, I), dW (D, I))."""
    g_ND, end = begin_row_gradient(g, weight, group, sequence)
    return end(), torch.mm(g_ND.t(), x)


def _runs(weights: Sequence[Tensor]) -> list[Tensor]:
    """Weights (O_i, D) joined where one begins in memory where the last one ended."""
    runs = [weights[0]]
    for weight in weights[1:]:
        last = runs[-1]
        same = storage_address(last.untyped_storage()) == storage_address(weight.untyped_storage())
        whole = last.is_contiguous() and weight.is_contiguous()
        if same and whole and weight.storage_offset() == last.storage_offset() + last.numel():
            runs[-1] = last.as_strided((last.shape[0] + weight.shape[0], weight.shape[1]), last.stride())
        else:
            runs.append(weight)
    return runs


# ---------------------------------------------------------------------- shapes alone, and gradients


@_column.register_fake
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor], group: str, sequence: bool) -> tuple[Tensor, Tensor]:
    tokens = x.shape[0] * (size_of(group) if sequence else 1)
    y_NO = x.new_empty(tokens, sum(weight.shape[0] for weight in weights))
    return y_NO, x.new_empty(tokens, x.shape[1]) if sequence else x.new_empty(0)


@_column_backward.register_fake
def _(
    g: Tensor, x: Tensor, weights: list[Tensor], group: str, sequence: bool, biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = x.shape[0] // (size_of(group) if sequence else 1)
    return x.new_empty(tokens, x.shape[1]), x.new_empty(g.shape[1], x.shape[1]), x.new_empty(g.shape[1] * biased)


@_row.register_fake
def _(x: Tensor, weight: Tensor, group: str, sequence: bool) -> Tensor:
    return x.new_empty(x.shape[0] // (size_of(group) if sequence else 1), weight.shape[0])


@_row_backward.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor, group: str, sequence: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _column_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weights, biases, ctx.group, ctx.sequence = inputs
    ctx.save_for_backward(output[1] if ctx.sequence else x, *weights)
    ctx.num_biases = len(biases)
    ctx.set_materialize_grads(False)


def _column_gradient(ctx: Any, g: Tensor, _kept: None) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    dx, dw_OD, db_O = _column_backward(g, x, weights, ctx.group, ctx.sequence, ctx.num_biases > 0)
    sizes = [weight.shape[0] for weight in weights]
    return dx, list(dw_OD.split(sizes)), list(db_O.split(sizes)) if ctx.num_biases else [], None, None


def _row_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.group, ctx.sequence = inputs
    ctx.save_for_backward(x, weight)


def _row_gradient(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    return *_row_backward(g, x, weight, ctx.group, ctx.sequence), None, None


_column.register_autograd(_column_gradient, setup_context=_column_setup)
_row.register_autograd(_row_gradient, setup_context=_row_setup)
