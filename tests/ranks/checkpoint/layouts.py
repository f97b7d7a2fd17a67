"""The layouts between which checkpoints are carried, as a table, and what runs on each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path

import torch

from meshwright.arch.arch import Arch, Experts
from meshwright.checkpoint.loader import load
from meshwright.checkpoint.saver import Progress, Saver
from meshwright.comm.agree import Side
from meshwright.comm.mesh import Mesh
from meshwright.config.choices import Balance, Dtype, OptimizerKind, Schedule
from meshwright.layout.axes import Degrees
from meshwright.parallel.engine import Engine
from meshwright.plan.plan import (
    Batch,
    ContextSplit,
    Data,
    Execution,
    Moe,
    Optimizer,
    Pipeline,
    Plan,
    Precision,
    Sharding,
)
from meshwright.plan.plan import Start as StartValues
from meshwright.plan.rules import canonical, check_plan
from meshwright.plan.stages import balanced
from meshwright.verify.batches import global_batches, local_share

DOUBLE = Precision(Dtype.FLOAT64, Dtype.FLOAT64, Dtype.FLOAT64)
ADAMW = Optimizer(learning_rate=0.05, eps=1e-3, clip_norm=0.5, warmup_steps=2)
SGD = Optimizer(kind=OptimizerKind.SGD, learning_rate=0.05, weight_decay=0.0, clip_norm=0.5)
HALF, LENGTH = 5, 8
"""Steps before the save and after it; tokens of a sequence."""


@dataclass(frozen=True)
class Layout:
    """A row of the table. Vocabulary 67 and hidden 24: no number of ranks divides what is flat."""

    name: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    within: int = 0
    reshard: bool = True
    sequence: bool = False
    schedule: Schedule = Schedule.ONE_F_ONE_B
    chunks: int = 1
    optimizer: Optimizer = ADAMW
    precision: Precision = DOUBLE
    tied: bool = False
    layers: int = 4
    experts: Experts | None = None

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.cp * self.ep

    @property
    def plan(self) -> Plan:
        arch = Arch(
            "llama", layers=self.layers, hidden=24, heads=4, kv_heads=2, head_dim=8, ffn=40, vocab=67,
            tie_embeddings=self.tied, dropout=0.1, experts=self.experts,
        )  # fmt: skip
        parts = self.pp * self.chunks
        plan = Plan(
            name="tiny",
            seed=0,
            arch=arch,
            start=StartValues(),
            data=Data(sequence_length=LENGTH),
            batch=Batch(12, 3 if self.dp * self.ep in (1, 2, 4) and self.pp == 1 else 1),
            optimizer=self.optimizer,
            precision=self.precision,
            degrees=Degrees(dp=self.dp, tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep),
            sharding=Sharding(self.zero, self.within, self.reshard),
            pipeline=Pipeline(self.schedule, self.chunks, balanced([1.0] * self.layers, 0.0, 0.0, parts)),
            context=ContextSplit(),
            execution=Execution(sequence=self.sequence),
            moe=Moe(Balance.BIAS) if self.experts is not None else Moe(),
        )
        plan = canonical(plan)
        check_plan(plan)
        return plan


LAYOUTS = (
    Layout("one"),
    Layout("dp 2", dp=2),
    Layout("dp 2, ZeRO 1", dp=2, zero=1),
    Layout("dp 2, ZeRO 2", dp=2, zero=2),
    Layout("dp 2, ZeRO 3", dp=2, zero=3),
    Layout("dp 3, ZeRO 3", dp=3, zero=3),
    Layout("dp 4, ZeRO 2 within 2", dp=4, zero=2, within=2),
    Layout("dp 4, ZeRO 3, kept gathered", dp=4, zero=3, reshard=False),
    Layout("pp 2", pp=2),
    Layout("pp 2 interleaved, dp 2, ZeRO 1", dp=2, pp=2, zero=1, schedule=Schedule.INTERLEAVED, chunks=2),
    Layout("tp 2, sequence", tp=2, sequence=True),
    Layout("tp 2, dp 2, ZeRO 3", tp=2, dp=2, zero=3),
    Layout("cp 2, dp 2, ZeRO 3", cp=2, dp=2, zero=3),
)
_ROUTED = (
    *(layout for layout in LAYOUTS if layout.name in ("dp 2, ZeRO 3", "pp 2", "tp 2, sequence")),
    Layout("ep 2, ZeRO 1", ep=2, zero=1),
    Layout("ep 4, ZeRO 2", ep=4, zero=2),
    Layout("ep 2, tp 2", ep=2, tp=2),
    Layout("ep 2, dp 2, ZeRO 3", ep=2, dp=2, zero=3),
    Layout("one"),
)
ALL_EXPERTS = tuple(
    replace(layout, name=f"experts, {layout.name}", experts=Experts(4, 2, 16), layers=2) for layout in _ROUTED
)
"""Whose loads a bias evens: what is saved of it decides where tokens go."""
EXPERTS = ALL_EXPERTS[:4]
TIED = tuple(
    replace(layout, name=f"tied, {layout.name}", tied=True)
    for layout in LAYOUTS
    if layout.name in ("dp 2, ZeRO 3", "pp 2", "tp 2, dp 2, ZeRO 3")
)


@dataclass(frozen=True)
class Carried:
    """Saved by one layout, continued by another."""

    source: Layout
    target: Layout

    @property
    def name(self) -> str:
        return f"{self.source.name} -> {self.target.name}"


@lru_cache(maxsize=16)
def mesh_of(degrees: Degrees, within: int) -> Mesh:
    """Communicators are made once a launch, whatever the number of cases."""
    return Mesh(degrees.dp, degrees.tp, degrees.pp, degrees.cp, degrees.ep, shard_within=within).start()


@lru_cache(maxsize=1)
def side() -> Side:
    return Side()


def engine_of(layout: Layout) -> Engine:
    plan = layout.plan
    return Engine(plan, mesh_of(plan.degrees, plan.sharding.within))


def trained(engine: Engine, first: int, last: int) -> list[float]:
    """Losses of steps [first, last)."""
    plan = engine.plan
    batches = islice(global_batches(plan, last), first, None)
    return [
        engine.step(local_share(plan, batch, engine.mesh.rank), plan.optimizer.learning_rate).loss for batch in batches
    ]


def save_and_go_on(rank: int, layout: Layout, root: Path, asynchronous: bool = True) -> list[float]:
    """Train, save after HALF steps, train on while it is written: all losses."""
    engine = engine_of(layout)
    losses = trained(engine, 0, HALF)
    saver = Saver(engine, folder_of(root, layout), asynchronous=asynchronous, side=side(), block_bytes=4096)
    saver.save(Progress(HALF, HALF * engine.plan.batch.sequences))
    losses += trained(engine, HALF, 2 * HALF)
    saver.close()
    return losses


def continue_from(rank: int, case: Carried, root: Path) -> list[float]:
    """Load what another layout saved and train on: the losses after the save."""
    engine = engine_of(case.target)
    for store in engine.stores:  # start values must not help
        store.master.fill_(torch.nan)
        if store.shard is None:
            store.whole.fill_(torch.nan)
    for bias in engine.balancer.biases.values() if engine.balancer is not None else ():
        bias.fill_(torch.nan)
    manifest = load(engine, folder_of(root, case.source), side())
    assert (manifest.step, manifest.samples) == (HALF, HALF * engine.plan.batch.sequences)
    return trained(engine, HALF, 2 * HALF)


def folder_of(root: Path, layout: Layout) -> Path:
    return root / layout.name.replace(" ", "-").replace(",", "")
