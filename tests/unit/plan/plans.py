"""Small plans, built by hand: what the tests of this folder look at."""

from __future__ import annotations

from typing import Any

from meshwright.arch.arch import Arch
from meshwright.config.choices import Recompute, Schedule
from meshwright.layout.axes import Degrees
from meshwright.plan.plan import (
    Batch,
    ContextSplit,
    Data,
    Execution,
    Optimizer,
    Pipeline,
    Plan,
    Precision,
    Sharding,
    Start,
)
from meshwright.plan.stages import balanced


def make_arch(layers: int = 2, **fields: Any) -> Arch:
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 257} | fields
    return Arch("llama", layers=layers, **sizes)


def make_plan(
    *,
    layers: int = 2,
    accumulation: int = 1,
    micro: int = 1,
    zero: int = 0,
    within: int = 0,
    reshard: bool = True,
    bucket_bytes: int = 0,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    chunks: int = 1,
    stages: tuple[int, ...] = (),
    recompute: Recompute = Recompute.NONE,
    precision: Precision | None = None,
    optimizer: Optimizer | None = None,
    arch: dict[str, Any] | None = None,
    **degrees: int,
) -> Plan:
    """A plan of the tiny model: M0 with 257 tokens, sequences of 32."""
    mesh = Degrees(**degrees)
    model = make_arch(layers, **(arch or {}))
    return Plan(
        name="tiny",
        seed=0,
        arch=model,
        start=Start(),
        data=Data(sequence_length=32),
        batch=Batch(sequences=accumulation * micro * mesh.dp * mesh.ep, micro=micro),
        optimizer=optimizer or Optimizer(),
        precision=precision or Precision(),
        degrees=mesh,
        sharding=Sharding(zero, within, reshard, bucket_bytes),
        pipeline=Pipeline(schedule, chunks, stages or balanced([1.0] * layers, 0.0, 0.0, mesh.pp * chunks)),
        context=ContextSplit(),
        execution=Execution(recompute=recompute),
    )
