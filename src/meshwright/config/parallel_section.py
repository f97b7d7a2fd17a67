"""The ``[mesh]``, ``[parallel]`` and ``[moe]`` tables: how many ways each axis cuts, and how."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, Strict, field_validator, model_validator

from meshwright.config.choices import (
    AxisName,
    Balance,
    Balanced,
    Context,
    Fill,
    Offload,
    Recompute,
    Schedule,
    Statistic,
)
from meshwright.config.chunks import check_chunks
from meshwright.config.errors import RequestError
from meshwright.config.values import NonNegative, Number, Positive, Section, Switch, Text

__all__ = ["MeshConfig", "MoeConfig", "ParallelConfig"]


class MeshConfig(Section):
    """Degrees of the five axes, and which axis lies nearest to which link."""

    dp: Positive | Fill = 2
    """Data-parallel degree, or "fill": what the number of ranks leaves."""
    tp: Positive = 1
    """Tensor-parallel degree."""
    pp: Positive = 1
    """Pipeline stages."""
    cp: Positive = 1
    """Context-parallel degree."""
    ep: Positive = 1
    """Expert-parallel degree; its ranks read different data."""
    order: tuple[AxisName, ...] = Field(
        default=tuple(AxisName), json_schema_extra={"minItems": 5, "maxItems": 5, "uniqueItems": True}
    )
    """The five axes, outermost first."""

    @field_validator("order")
    @classmethod
    def _check_order(cls, order: tuple[AxisName, ...]) -> tuple[AxisName, ...]:
        if sorted(order) != sorted(AxisName):
            given = ", ".join(f'"{axis}"' for axis in order)
            default = ", ".join(f'"{axis}"' for axis in AxisName)
            raise RequestError(f"mesh.order = [{given}]", "must name each of the five axes once", (f"[{default}]",))
        return order


class ParallelConfig(Section):
    """How each axis is used."""

    zero: Annotated[int, Strict(), Field(ge=0, le=3)] = 0
    """ZeRO stage: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters sharded."""
    zero_shard_within: NonNegative = 0
    """0: shard over all replicas; k: inside groups of k, replicated across."""
    reshard_after_forward: Switch = True
    """Stage 3: false keeps gathered parameters until backward."""
    bucket_bytes: NonNegative = 0
    """Size of a gradient bucket; 0: one bucket a block."""
    sequence: Switch = True
    """Sequence parallel with tp."""
    asynchronous_tensor: Switch = False
    """Tensor collectives in chunks under the products (CUDA)."""
    schedule: Schedule = Schedule.ONE_F_ONE_B
    """Pipeline schedule."""
    chunks: Positive = 1
    """Model chunks a stage: interleaved at least 2, zb-v 2, all others 1."""
    stages: Balanced | Annotated[tuple[Positive, ...], Field(min_length=1)] = Balanced.BALANCED
    """"balanced", or a list of layer counts."""
    context: Context = Context.RING
    """How attention crosses the context axis."""
    context_inner: Positive = 1
    """k > 1 with ring: ulysses inside groups of k, ring across."""
    recompute: Recompute = Recompute.NONE
    """What backward computes again instead of keeping it."""
    offload: Offload = Offload.NONE
    """What lives outside device memory between its uses."""
    offload_to: Text = "memory"
    """"memory", or a folder."""
    compile: Switch = False
    """Compile each unit."""

    @model_validator(mode="after")
    def _check_chunks(self) -> Self:
        check_chunks(self.schedule, self.chunks)
        return self

    @model_validator(mode="after")
    def _check_context(self) -> Self:
        if self.context_inner > 1 and self.context is not Context.RING:
            raise RequestError(
                f'parallel.context_inner = {self.context_inner} with parallel.context = "{self.context}"',
                "only the ring has an inner group",
                ("parallel.context_inner = 1", 'parallel.context = "ring"'),
            )
        return self


class MoeConfig(Section):
    """Routing of models with experts."""

    balance: Balance = Balance.AUXILIARY
    """auxiliary (a loss with coefficient auxiliary_loss), bias, or none."""
    auxiliary_loss: Number = 0.01
    """Coefficient of the balance loss."""
    z_loss: Number = 0.0
    """Coefficient of the router's z-loss."""
    statistic: Statistic = Statistic.SEQUENCE
    """sequence, or lagged: the global batch, one step late."""
    capacity: Number = 0.0
    """Tokens an expert takes, as a multiple of an even share; 0: nothing dropped."""
