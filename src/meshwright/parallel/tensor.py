"""Tensor and sequence parallelism, executed: forwards of the plain model's modules, replaced.

Parameters are local views of the buckets already; nothing here knows a shape. The declared half is
`plan.strategies.tensor`: what is cut, and every collective that the modules below make.

    embedding    look-up            vocabulary-parallel, then f* or g*
    block        query key value    column-parallel: f or g            gate up    the same
                 output             row-parallel: f* or g*             down       the same
                                                                   experts    f or g before the router, f* or g* after
    head         loss               vocabulary-parallel, after f or g

Norms and dropout are untouched: under sequence parallel they see N/T tokens, and `held_rows` gives dropout their keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from meshwright.layout.axes import Coordinates
from meshwright.layout.ownership import Ownership
from meshwright.model.attention import Attention
from meshwright.model.decoder import Block, Embedding, Head
from meshwright.model.mlp import MLP, GatedMLP
from meshwright.model.moe import RoutedMLP
from meshwright.model.rows import Rows
from meshwright.parallel.experts import tensor_parallel_experts
from meshwright.parallel.split import WeightProducts
from meshwright.parallel.tensor_direct import direct_column, direct_loss, direct_row
from meshwright.parallel.tensor_linear import column_product, row_product
from meshwright.parallel.tensor_vocabulary import vocabulary_look_up, vocabulary_loss
from meshwright.plan.owners import owners
from meshwright.plan.plan import Plan

__all__ = ["RowLinear", "TensorAxis", "apply_tensor", "held_rows", "tensor_axis"]


@dataclass(frozen=True, slots=True)
class TensorAxis:
    """Where a rank stands on the tensor axis, as its modules need it.

    `group` is a registered name. `held` is (first, number) of the tokens of the vocabulary that stand here. `direct`
    takes the weight products of an eager run; None where a compiled graph needs operations that it can trace.
    """

    group: str
    sequence: bool
    held: tuple[int, int]
    direct: WeightProducts | None = None

    def products(self, x_ND: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """`model.products.Products`, column-parallel."""
        weights = [linear.weight for linear in linears]
        biases = [bias for bias in map(_bias, linears) if bias is not None]
        if self.direct is not None:
            return direct_column(x_ND, weights, biases, self.group, self.sequence, self.direct)
        return column_product(x_ND, weights, biases, self.group, self.sequence)

    def row_product(self, x_NI: Tensor, weight_DI: Tensor) -> Tensor:
        """(N, I) -> (N, D), or (N/T, D) under sequence parallel."""
        if self.direct is not None:
            return direct_row(x_NI, weight_DI, self.group, self.sequence, self.direct)
        return row_product(x_NI, weight_DI, self.group, self.sequence)

    def look_up(self, tokens_BS: Tensor, rows: Rows, weight: Tensor, positions: Tensor | None) -> Tensor:
        """`model.decoder.Lookup`, vocabulary-parallel."""
        return vocabulary_look_up(tokens_BS, rows.positions, weight, positions, self.held, self.group, self.sequence)

    def loss(self, x_ND: Tensor, weight: Tensor, labels_BS: Tensor, count: Tensor) -> Tensor:
        """`model.decoder.Criterion`, vocabulary-parallel."""
        if self.direct is not None:
            return direct_loss(x_ND, weight, labels_BS, count, self.held, self.group, self.sequence, self.direct)
        return vocabulary_loss(x_ND, weight, labels_BS, count, self.held, self.group, self.sequence)


class RowLinear(nn.Module):
    """A row-parallel linear in the place of a plain one; the bias is added once, to the sum."""

    def __init__(self, linear: nn.Linear, axis: TensorAxis) -> None:
        super().__init__()
        self.weight, self.axis = linear.weight, axis
        self.bias = _bias(linear)

    def forward(self, x_NI: Tensor) -> Tensor:
        """(N, I) -> (N, D), or (N/T, D) under sequence parallel."""
        y_ND = self.axis.row_product(x_NI, self.weight)
        return y_ND if self.bias is None else y_ND + self.bias


def tensor_axis(plan: Plan, at: Coordinates, group: str, products: WeightProducts) -> TensorAxis:
    """The tensor axis of the rank at `at`; `group` is the registered name of its tensor group."""
    (table,) = (owner for owner in owners(plan) if owner.tensor.name == "embedding.weight")
    direct = None if plan.execution.compile else products
    return TensorAxis(group, plan.execution.sequence, _rows_held(plan, at, table), direct)


def apply_tensor(units: Sequence[nn.Module], axis: TensorAxis) -> None:
    """Replace the forwards of these units, in place, once.

    Raises TypeError for a unit of another kind, ValueError for one that is parallel already.
    """
    for unit in units:
        match unit:
            case Embedding():
                unit.lookup = axis.look_up
            case Block():
                _apply_to_block(unit, axis)
            case Head():
                unit.criterion = axis.loss
            case _:
                raise TypeError(f"{type(unit).__name__} is no unit of the decoder")


def held_rows(plan: Plan, at: Coordinates, rows: Rows) -> Rows:
    """Rows of the residual stream: under sequence parallel dropout sees this rank's chunk of the tokens."""
    if not plan.execution.sequence:
        return rows
    return replace(rows, token_keys=rows.token_keys.chunk(plan.degrees.tp)[at.tp])


def _apply_to_block(block: Block, axis: TensorAxis) -> None:
    attention, mlp = block.attention, block.mlp
    if not isinstance(mlp, MLP | GatedMLP | RoutedMLP):
        raise TypeError(f"{type(mlp).__name__} has no tensor-parallel form")
    rows = ((attention, "output"),) if isinstance(mlp, RoutedMLP) else ((attention, "output"), (mlp, "down"))
    for module, name in rows:
        linear = getattr(module, name)
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"this block is tensor-parallel already: its {name} is a {type(linear).__name__}")
        setattr(module, name, RowLinear(linear, axis))
    assert isinstance(attention, Attention)
    attention.products = axis.products
    if isinstance(mlp, RoutedMLP):
        assert axis.direct is not None
        tensor_parallel_experts(mlp, axis.group, axis.sequence, axis.direct)
    else:
        mlp.products = axis.products


def _bias(linear: nn.Linear) -> nn.Parameter | None:
    bias: nn.Parameter | None = linear.bias
    return bias


def _rows_held(plan: Plan, at: Coordinates, table: Ownership) -> tuple[int, int]:
    box = table.rectangle(plan.degrees, at)
    return box.start[0], box.extent[0]
