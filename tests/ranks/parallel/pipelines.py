"""Pipelines of a tiny model, and what a run of one is compared by: whole logical tensors, gathered from all stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.arch.arch import Arch
from meshwright.arch.parameters import tensors
from meshwright.checkpoint.held import gradients, parameters
from meshwright.comm.exchange import Held
from meshwright.comm.mesh import Mesh
from meshwright.config.choices import Recompute, Schedule
from meshwright.layout.axes import Degrees
from meshwright.layout.moves import Piece
from meshwright.parallel.engine import Engine
from meshwright.plan.action import Action, Op
from meshwright.plan.plan import Batch, ContextSplit, Data, Execution, Optimizer, Pipeline, Plan, Precision, Sharding
from meshwright.plan.plan import Start as StartValues
from meshwright.plan.rules import canonical, check_plan
from meshwright.plan.schedules import ScheduleFunction
from meshwright.plan.stages import balanced
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.plain import ADAMW, DOUBLE
from tests.ranks.parallel.running import Ran

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


@contextmanager
def pipeline_of(plan: Plan, schedule: ScheduleFunction | None = None) -> Iterator[Engine]:
    """An engine on all ranks of the launch."""
    mesh = Mesh.of(plan).start()
    try:
        yield Engine(plan, mesh, schedule=schedule)
    finally:
        mesh.close()


def train(engine: Engine, steps: int) -> Ran:
    """Run the plan's made-up batches and keep everything."""
    ran = Ran()
    plan = engine.plan
    for batch in global_batches(plan, steps):
        taken: Held = {}

        def before(action: Action, into: Held = taken) -> None:
            if action.op is Op.UPDATE and not into:
                into.update({piece: view.clone() for piece, view in gradients(engine).items()})

        engine.observe(before)
        engine.mesh.ledger.clear()
        ran.results.append(engine.step(local_share(plan, batch, engine.mesh.rank), plan.optimizer.learning_rate))
        ran.rows.append(engine.mesh.ledger.rows)
        engine.observe(None)
        ran.gradients.append(whole(plan, taken))
        ran.weights.append(whole(plan, parameters(engine)))
    return ran


def whole(plan: Plan, held: Held) -> dict[str, Tensor]:
    """Logical tensors from the pieces of all ranks and stages; where pieces overlap they must be equal bit for bit."""
    mine = [(piece, view.clone()) for piece, view in held.items()]
    parts: list[list[tuple[Piece, Tensor]]] = [[] for _ in range(plan.degrees.ranks)]
    dist.all_gather_object(parts, mine)
    out = {tensor.name: torch.full(tensor.shape, torch.nan, dtype=torch.float64) for tensor in tensors(plan.arch)}
    for piece, values in (each for part in parts for each in part):
        view = out[piece.tensor][tuple(map(slice, piece.rectangle.start, piece.rectangle.stop))]
        seen = ~view.isnan()
        assert torch.equal(view[seen], values[seen]), f"copies of {piece.tensor} differ"
        view.copy_(values)
    missing = [name for name, tensor in out.items() if bool(tensor.isnan().any())]
    assert not missing, f"held by nobody: {missing}"
    return out
