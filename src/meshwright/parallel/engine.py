"""The engine: a plan made real on one rank.

stores      flat memory, one a bucket, initialised from ownership: weights are materialised once
units       the plain model's modules of this stage, their parameters replaced by views of that memory
executor    the literal program over both
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshwright.comm.mesh import Mesh
from meshwright.data.batch import Batch
from meshwright.model.decoder import build_decoder
from meshwright.parallel.allocator import Allocator
from meshwright.parallel.dtypes import TORCH_DTYPES
from meshwright.parallel.executor import Executor
from meshwright.parallel.store import Store
from meshwright.plan.action import Action, Kind
from meshwright.plan.norm import NormPart
from meshwright.plan.plan import Plan
from meshwright.plan.program import program
from meshwright.plan.schedules import ScheduleFunction
from meshwright.plan.stages import stage_units


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step says of itself; equal on every rank.

    `loss` is the mean over trained tokens of the global batch at the weights before the step; `grad_norm` the norm of
    the whole logical gradient before clipping; `finite` False: the weights were not touched; `stop`: some rank was
    asked to stop.
    """

    loss: float
    grad_norm: float
    trained_tokens: int
    finite: bool
    stop: bool = False


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Sums over one evaluation batch of all ranks."""

    loss_sum: float
    trained_tokens: int


class Engine:
    """One rank of a run: `mesh` has been started; all ranks call the same methods in the same order.

    `schedule` replaces the pipeline schedule that the plan names, on all ranks.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        device: torch.device | str = "cpu",
        *,
        schedule: ScheduleFunction | None = None,
    ) -> None:
        if plan.degrees != mesh.degrees:
            raise ValueError(f"the plan is for {plan.degrees}, the mesh is {mesh.degrees}")
        self.plan, self.mesh = plan, mesh
        self.allocator = Allocator(torch.device(device))
        training = program(plan, mesh.rank, Kind.TRAIN, schedule)
        self.stores = [Store(plan, bucket, mesh.coordinates, self.allocator) for bucket in training.buckets]
        self.model = build_decoder(plan.arch, dtype=TORCH_DTYPES[plan.precision.compute], device="meta")
        here = stage_units(plan, training.stage)
        units = {unit: self.model.units[unit] for unit in here}
        self._adopt_parameters()
        for store in self.stores:
            store.initialise()
        self._train = Executor(plan, training, mesh, units, self.stores, self.allocator)
        evaluating = program(plan, mesh.rank, Kind.EVALUATE, schedule)
        self._evaluate = Executor(plan, evaluating, mesh, units, self.stores, self.allocator)

    def step(self, batch: Batch, learning_rate: float, stop: bool = False) -> StepResult:
        """One optimizer step on this rank's share of the global batch (accumulation * micro sequences).

        `stop`: this rank was asked to stop; the step is taken, and every rank's result says so.
        """
        self.model.train()
        self._train.run(batch, learning_rate, stop)
        done = self._train
        asked = bool(done.packed[NormPart.STOP] > 0)
        return StepResult(float(done.loss), done.norm, int(done.count), done.finite, asked)

    def evaluate(self, batch: Batch) -> Evaluation:
        """Forward only, on this rank's share of a batch of the same shape as a training batch."""
        self.model.eval()
        self._evaluate.run(batch)
        return Evaluation(float(self._evaluate.loss), int(self._evaluate.count))

    def observe(self, before: Callable[[Action], None] | None) -> None:
        """Call `before(action)` ahead of every action of a training step; it may look, not touch. None ends it."""
        self._train.before = before

    @property
    def position(self) -> tuple[Kind, int]:
        """The action in work, for reports: (kind, index), -1 between steps."""
        running = self._evaluate if self._evaluate.position >= 0 else self._train
        return running.program.kind, running.position

    def _adopt_parameters(self) -> None:
        """Put the stores' parameters where the plain model has its own; every one of this stage exactly once."""
        held = {name: parameter for store in self.stores for name, parameter in store.parameters.items()}
        for name, parameter in held.items():
            path, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(path), leaf, parameter)
        if self.plan.arch.tie_embeddings and "embedding.weight" in held:
            self.model.head.weight = held["embedding.weight"]
