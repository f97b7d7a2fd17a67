"""Pipelines of a tiny model, and what a run of one is compared by: whole logical tensors, gathered from all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.arch.arch import Arch
from meshwright.comm.mesh import Mesh
from meshwright.config.choices import Recompute, Schedule
from meshwright.layout.axes import Degrees
from meshwright.parallel.engine import Engine
from meshwright.parallel.store import Store
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
            degrees=Degrees(dp=self.dp, pp=self.pp),
            sharding=Sharding(self.zero, 0, self.reshard),
            pipeline=Pipeline(self.schedule, self.chunks, stages),
            context=ContextSplit(),
            execution=Execution(recompute=self.recompute),
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


@dataclass
class Pieces:
    """What one rank holds of one tensor: the elements [first, first + len) of its flattening."""

    name: str
    shape: tuple[int, ...]
    first: int
    elements: Tensor = field(repr=False)


def train(engine: Engine, steps: int) -> Ran:
    """Run the plan's made-up batches and keep everything."""
    ran = Ran()
    plan = engine.plan
    for batch in global_batches(plan, steps):
        taken: dict[int, Tensor] = {}

        def before(action: Action, into: dict[int, Tensor] = taken) -> None:
            if action.op is Op.UPDATE:
                into[action.bucket] = engine.stores[action.bucket].reduced.clone()

        engine.observe(before)
        engine.mesh.ledger.clear()
        ran.results.append(engine.step(local_share(plan, batch, engine.mesh.rank), plan.optimizer.learning_rate))
        ran.rows.append(engine.mesh.ledger.rows)
        engine.observe(None)
        ran.gradients.append(whole(engine.stores, lambda store, into=taken: into[store.bucket.index]))
        ran.weights.append(whole(engine.stores, _weights))
    return ran


def whole(stores: list[Store], piece: Callable[[Store], Tensor]) -> dict[str, Tensor]:
    """Gather every tensor from all ranks and stages; where pieces overlap they must be equal bit for bit."""
    mine = [held for store in stores for held in _pieces(store, piece(store).detach().clone())]
    parts = [mine]
    if dist.is_initialized():
        parts = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, mine)
    out: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for held in (each for rank in parts for each in rank):
        shape = torch.Size(held.shape)
        flat = out.setdefault(held.name, held.elements.new_zeros(shape.numel()))
        known = filled.setdefault(held.name, torch.zeros(shape.numel(), dtype=torch.bool))
        span = slice(held.first, held.first + held.elements.numel())
        assert torch.equal(flat[span][known[span]], held.elements[known[span]]), f"copies of {held.name} differ"
        flat[span], known[span] = held.elements, True
        out[held.name] = flat
    assert all(bool(known.all()) for known in filled.values()), "elements that nobody holds"
    shapes = {held.name: held.shape for rank in parts for held in rank}
    return {name: flat.view(shapes[name]) for name, flat in out.items()}


def _weights(store: Store) -> Tensor:
    return store.shard if store.shard is not None else store.whole[store.first : store.last]


def _pieces(store: Store, own: Tensor) -> Iterator[Pieces]:
    for segment in store.bucket.segments:
        low, high = max(segment.offset, store.first), min(segment.stop, store.last)
        if low < high:
            elements = own[low - store.first : high - store.first].clone()
            yield Pieces(segment.name, segment.shape, low - segment.offset, elements)
