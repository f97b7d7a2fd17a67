"""Pipelines of a tiny model, and engines of them."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.arch.arch import Arch
from meshwright.config.choices import Recompute, Schedule
from meshwright.layout.axes import Degrees
from meshwright.parallel.engine import Engine
from meshwright.plan.plan import Batch, ContextSplit, Data, Execution, Optimizer, Pipeline, Plan, Precision, Sharding
from meshwright.plan.plan import Start as StartValues
from meshwright.plan.rules import canonical, check_plan
from meshwright.plan.schedules import ScheduleFunction
from meshwright.plan.stages import balanced
from tests.ranks.parallel.logical import shared_mesh
from tests.ranks.parallel.plain import ADAMW, DOUBLE

SIZES = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 67}
LENGTH = 8


@dataclass(frozen=True)
class Pipelined:
    """A layout with stages. `stages` () cuts the layers evenly; `layers` 0 takes one a virtual stage, and one more."""

    schedule: Schedule = Schedule.ONE_F_ONE_B
    pp: int = 2
    micros: int = 4
    chunks: int = 1
    dp: int = 1
    zero: int = 0
    tp: int = 1
    sequence: bool = False
    layers: int = 0
    stages: tuple[int, ...] = ()
    tied: bool = False
    recompute: Recompute = Recompute.NONE
    reshard: bool = True
    optimizer: Optimizer = ADAMW
    precision: Precision = DOUBLE

    @property
    def name(self) -> str:
        words = [f"pp {self.pp} {self.schedule.value} m {self.micros}"]
        words += [f"{self.chunks} chunks"] * (self.chunks > 1) + [f"dp {self.dp} zero {self.zero}"] * (self.dp > 1)
        words += [f"tp {self.tp} sequence {self.sequence}"] * (self.tp > 1)
        words += [f"stages {self.stages}"] * bool(self.stages) + ["tied"] * self.tied
        words += ["recompute"] * (self.recompute is not Recompute.NONE)
        return ", ".join(words)

    @property
    def plan(self) -> Plan:
        layers = self.layers or sum(self.stages) or self.pp * self.chunks + 1
        stages = self.stages or balanced([1.0] * layers, 0.0, 0.0, self.pp * self.chunks)
        plan = Plan(
            name="tiny",
            seed=0,
            arch=Arch("llama", layers=layers, tie_embeddings=self.tied, **SIZES),
            start=StartValues(),
            data=Data(sequence_length=LENGTH),
            batch=Batch(self.dp * self.micros, 1),
            optimizer=self.optimizer,
            precision=self.precision,
            degrees=Degrees(dp=self.dp, pp=self.pp, tp=self.tp),
            sharding=Sharding(self.zero, 0, self.reshard),
            pipeline=Pipeline(self.schedule, self.chunks, stages),
            context=ContextSplit(),
            execution=Execution(recompute=self.recompute, sequence=self.sequence),
        )
        plan = canonical(plan)
        check_plan(plan)
        return plan


def pipeline_of(plan: Plan, schedule: ScheduleFunction | None = None) -> Engine:
    """An engine on all ranks of the launch."""
    return Engine(plan, shared_mesh(plan), schedule=schedule)
