"""A dry run: the real program of any rank of any world, on this machine, in seconds and without its memory.

    one process is rank r of R      groups exist, collectives move nothing             comm/pretend.py
    tensors are fake                shapes, dtypes and lifetimes; no values            torch's FakeTensorMode
    the engine is the engine        same stores, units, executor, custom operations    parallel/engine.py

What comes out is what a run measures, its ledger and the memory of a step, and must equal what the plan predicts.
Custom operations run their real kernels here, for those hold the collectives; without a dry run, a fake kernel counts
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from meshwright.comm.custom import real_kernel
from meshwright.comm.mesh import Mesh
from meshwright.comm.pretend import pretended_world
from meshwright.comm.torch_private import FakeTensorMode
from meshwright.config.choices import Documents
from meshwright.data.batch import Batch
from meshwright.layout.rows import whole_rows
from meshwright.parallel.engine import Engine
from meshwright.parallel.experts import routed_mlps
from meshwright.parallel.storage_watch import StorageWatch
from meshwright.plan.folds.ledger import Row, ledger
from meshwright.plan.folds.memory import Timeline, memory
from meshwright.plan.folds.traffic import Transport
from meshwright.plan.plan import Plan
from meshwright.plan.schedules import ScheduleFunction
from meshwright.plan.strategies.expert import even_loads
from meshwright.plan.strategies.tensor import micro_tokens

__all__ = ["DryRun", "dry_run"]


@dataclass(frozen=True, slots=True)
class DryRun:
    """What one rank did in one training step, beside what its plan predicted."""

    rank: int
    measured: tuple[Row, ...]
    predicted: tuple[Row, ...]
    timeline: Timeline
    """Measured. What the allocator makes has its category; the rest stands under activations."""
    expected: Timeline

    @property
    def traffic_equal(self) -> bool:
        return set(self.measured) == set(self.predicted)

    @property
    def states_equal(self) -> bool:
        """Parameters, moments and masters, to the byte."""
        return dict(self.timeline.states) == dict(self.expected.states)

    @property
    def peak_ratio(self) -> float:
        """Predicted over measured peak of live bytes."""
        return self.expected.peak_bytes / self.timeline.peak_bytes


def dry_run(
    plan: Plan, rank: int = 0, *, transport: Transport = Transport.DIRECT, schedule: ScheduleFunction | None = None
) -> DryRun:
    """Take one step of `plan` as `rank`, with fake tensors in a pretended world.

    `transport` is what moves the bytes: DIRECT on CPUs, where a collective over n ranks is n - 1 messages of this rank;
    NCCL on GPUs. Raises RuntimeError in a process that belongs to a process group.
    """
    with pretended_world(rank, plan.degrees.ranks), FakeTensorMode(allow_non_fake_inputs=True):
        mesh = Mesh.of(plan).start()
        mesh.ledger.transport = transport
        engine = Engine(plan, mesh, "cpu", schedule=schedule, start_values=False, read=_zeros)
        _spread_evenly(plan, engine)
        states = dict(engine.allocator.live)
        batch = _nothing(plan)
        mesh.ledger.clear()
        with StorageWatch(engine.allocator, real_kernel) as watch:
            engine.step(batch, plan.optimizer.learning_rate)
        measured = mesh.ledger.rows
        mesh.close()
    return DryRun(
        rank,
        measured,
        ledger(plan, rank, transport=transport),
        Timeline(states, tuple(watch.events)),
        memory(plan, rank, transport=transport),
    )


def _zeros(tensor: Tensor) -> list[float]:
    """A fake tensor has no values: a step that is finite, of norm 0, at loss 0."""
    return [0.0] * tensor.numel()


def _spread_evenly(plan: Plan, engine: Engine) -> None:
    """Nor do loads of experts: each has its share of the choices, as forecasts take it."""
    experts = plan.arch.experts
    if experts is None:
        return
    loads = even_loads(micro_tokens(plan) * experts.active, experts.count)
    own, place = experts.count // plan.degrees.ep, engine.mesh.coordinates.ep
    arriving = loads[place * own : (place + 1) * own] * plan.degrees.ep
    for mlp in routed_mlps(engine.model.units):
        mlp.read = partial(_even, loads, arriving)


def _even(loads: list[int], arriving: list[int], counts: Tensor) -> list[int]:
    """Of this rank's tokens, and with an expert axis behind them those that arrive from each of its ranks."""
    return loads if counts.numel() == len(loads) else loads + arriving


def _nothing(plan: Plan) -> Batch:
    """This rank's share of a step: tokens without meaning, all of them trained; where documents are masked, two in each
    sequence, of lengths that nothing divides."""
    sequences, length = plan.accumulation * plan.batch.micro, plan.data.sequence_length
    tokens = np.zeros((sequences, length), dtype=np.int64)
    documents = tokens + (np.arange(length) > length // 3) if plan.data.documents is Documents.MASKED else None
    return Batch(tokens, tokens, whole_rows(0, np.arange(sequences, dtype=np.int64), length, documents))
