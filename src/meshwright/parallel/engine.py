"""The engine: a plan made real on one rank.

stores      flat memory, one a bucket, initialised from ownership: weights are materialised once
units       the plain model's modules of this stage, their parameters replaced by views of that memory
executor    the literal program over both
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from meshwright.comm.communicator import Communicator
from meshwright.comm.mesh import Mesh
from meshwright.comm.registry import registered
from meshwright.config.choices import Recompute
from meshwright.data.batch import Batch, local_share
from meshwright.layout.groups import GroupName
from meshwright.model.decoder import Decoder, build_decoder
from meshwright.parallel.allocator import Allocator
from meshwright.parallel.balancing import Balancer
from meshwright.parallel.compile import compile_units
from meshwright.parallel.context import apply_context, context_axis
from meshwright.parallel.direct import apply_direct
from meshwright.parallel.dtypes import TORCH_DTYPES
from meshwright.parallel.executor import Executor
from meshwright.parallel.expert_axis import ExpertAxis
from meshwright.parallel.experts import apply_experts, whole_choices
from meshwright.parallel.norms import apply_norms
from meshwright.parallel.recompute import apply_selective
from meshwright.parallel.rotation import apply_rotation
from meshwright.parallel.split import WeightProducts
from meshwright.parallel.store import Store
from meshwright.parallel.support import check_supported
from meshwright.parallel.tensor import TensorAxis, apply_tensor, tensor_axis
from meshwright.plan.action import Action, Kind
from meshwright.plan.buckets import Bucket, sharding_group
from meshwright.plan.meeting import counts_together
from meshwright.plan.plan import Plan
from meshwright.plan.program import program
from meshwright.plan.schedules import ScheduleFunction
from meshwright.plan.stages import stage_units
from meshwright.plan.warnings import plan_warnings


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step says of itself; equal on every rank.

    `loss` is the mean over trained tokens of the global batch at the weights before the step; `grad_norm` the norm of
    the whole logical gradient before clipping; `finite` False: the weights were not touched; `stop`: some rank was
    asked to stop; `overflowed`: float16 gradients did not fit under the loss scale, which was halved, and the weights
    were not touched (no fault: the norm is then infinite or NaN); `loss_scale`: what the next step will use; `terms`:
    where routers add any, the auxiliary and the z term that were differentiated beside `loss`.
    """

    loss: float
    grad_norm: float
    trained_tokens: int
    finite: bool
    stop: bool = False
    overflowed: bool = False
    loss_scale: float = 1.0
    terms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Sums over one evaluation batch of all ranks."""

    loss_sum: float
    trained_tokens: int


class Engine:
    """One rank of a run: `mesh` has been started; all ranks call the same methods in the same order.

    `model`, a decoder of the plan's architecture, is taken over in place; its values are not read. `schedule` replaces
    the pipeline schedule that the plan names, on all ranks. Without `start_values` parameters are left as they are
    allocated, for whoever fills them. `read` brings the few numbers that decide a step to the host.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        device: torch.device | str = "cpu",
        *,
        model: Decoder | None = None,
        schedule: ScheduleFunction | None = None,
        start_values: bool = True,
        read: Callable[[Tensor], list[float]] = Tensor.tolist,
    ) -> None:
        mesh.check_runs(plan)
        check_supported(plan)
        self.plan, self.mesh = plan, mesh
        self.allocator = Allocator(torch.device(device))
        training = program(plan, mesh.rank, Kind.TRAIN, schedule)
        self.stores = [
            Store(plan, bucket, mesh.coordinates, self.allocator, self._readers(bucket)) for bucket in training.buckets
        ]
        dtype = TORCH_DTYPES[plan.precision.compute]
        self.model = build_decoder(plan.arch, dtype=dtype, device="meta") if model is None else model
        here = stage_units(plan, training.stage)
        units = {unit: self.model.units[unit] for unit in here}
        self._products, self._names = WeightProducts(self.stores), set[str]()
        self._apply_strategies(units)
        self._adopt_parameters()
        self.expert_axis: ExpertAxis | None = None
        self.balancer: Balancer | None = None
        if plan.arch.experts is not None:
            self.expert_axis = self._apply_experts(units, read)
            self.balancer = Balancer(plan, units, mesh.coordinates, self.allocator.device)
        if start_values:
            for store in self.stores:
                store.initialise()
        parts = mesh, units, self.stores, self.allocator, self._products, read
        self._train = Executor(plan, training, *parts, self.balancer, self.expert_axis)
        self.loss_scale = self._train.loss_scale
        on_cpu = self.allocator.device.type == "cpu"
        for told in plan_warnings(plan, on_cpu) if mesh.rank == 0 else ():
            warnings.warn(told, stacklevel=2)
        evaluating = program(plan, mesh.rank, Kind.EVALUATE, schedule)
        self._evaluate = Executor(plan, evaluating, *parts)

    def step(self, batch: Batch, learning_rate: float, stop: bool = False) -> StepResult:
        """One optimizer step on this rank's share of the global batch (accumulation * micro sequences).

        `stop`: this rank was asked to stop; the step is taken, and every rank's result says so. Raises ValueError at a
        batch of another shape.
        """
        self._check_shape(batch)
        if not self.model.training:  # a walk over all modules
            self.model.train()
        self._train.run(batch, learning_rate, stop)
        done = self._train
        loss, count = done.read()
        scale, terms = self.loss_scale.value, tuple(done.terms)
        return StepResult(loss, done.norm, count, done.finite, done.stops, done.overflowed, scale, terms)

    def share(self, batch: Batch) -> Batch:
        """This rank's sequences of a global batch: see `local_share`."""
        return local_share(self.plan, batch, self.mesh.rank)

    def evaluate(self, batch: Batch) -> Evaluation:
        """Forward only, on this rank's share of a batch of the same shape as a training batch, else a ValueError."""
        self._check_shape(batch)
        self.model.eval()
        self._evaluate.run(batch)
        return Evaluation(*self._evaluate.read())

    def _check_shape(self, batch: Batch) -> None:
        """Another number of sequences, or of tokens, is another step: cut, counted and sent otherwise."""
        plan = self.plan
        wanted = plan.accumulation * plan.batch.micro, plan.data.sequence_length
        if batch.inputs.shape != wanted:
            sequences, tokens = batch.inputs.shape
            raise ValueError(
                f"a share of {sequences} x {tokens} tokens: a rank's step takes {wanted[0]} sequences of {wanted[1]}, "
                f"engine.share(batch) of a global batch of {plan.batch.sequences}"
            )

    def observe(self, before: Callable[[Action], None] | None) -> None:
        """Call `before(action)` ahead of every action of a training step; it may look, not touch. None ends it."""
        self._train.before = before

    @property
    def position(self) -> tuple[Kind, int]:
        """The action in work, for reports: (kind, index), -1 between steps."""
        running = self._evaluate if self._evaluate.position >= 0 else self._train
        return running.program.kind, running.position

    def _readers(self, bucket: Bucket) -> Communicator | None:
        """Who may read this rank's shard of a bucket where it lies, see `comm/shared.py`; None: it is sent.

        That they count together tells that their last updates are done.
        """
        group = sharding_group(self.plan, bucket.replicas)
        shares = self.mesh.shares_memory and self.allocator.device.type == "cpu"
        if self.plan.sharding.stage < 3 or group.size == 1 or not (shares and counts_together(self.plan, group.name)):
            return None
        return self.mesh.communicator(group.name)

    def _apply_strategies(self, units: dict[int, nn.Module]) -> None:
        """Replace forwards, in this order: norms, rotation, context, tensor, products, recomputation, compilation."""
        execution = self.plan.execution
        if not execution.compile:  # a compiler fuses them by itself
            apply_norms(units.values())
            apply_rotation(units.values())
        if self.plan.degrees.cp > 1:
            apply_context(units.values(), context_axis(self.plan, self._group))
        axis = self._apply_tensor(units) if self.plan.degrees.tp > 1 else None
        if execution.compile:
            compile_units(units.values())
            return
        if axis is None:
            apply_direct(units.values(), self._products)
        if execution.recompute is Recompute.SELECTIVE:  # a compiler chooses by itself what it keeps
            apply_selective(units.values(), self._products, axis, keeps_core=self.plan.degrees.cp > 1)

    def _apply_experts(self, units: dict[int, nn.Module], read: Callable[[Tensor], list[float]]) -> ExpertAxis | None:
        """Replace the forwards of routers and experts; None where all experts are here."""
        apply_experts(units.values(), self._products, read)
        if self.plan.degrees.cp > 1:
            whole_choices(units.values(), self._group(GroupName.CP))
        if self.plan.degrees.ep == 1:
            return None
        group = self._group(GroupName.EP)
        return ExpertAxis(self.plan, self.mesh.coordinates, group, units)

    def _apply_tensor(self, units: dict[int, nn.Module]) -> TensorAxis:
        over = replace(self.mesh.communicator(GroupName.TP), ring=self.plan.execution.asynchronous_tensor)
        axis = tensor_axis(self.plan, self.mesh.coordinates, self._named(over), self._products)
        apply_tensor(list(units.values()), axis)
        return axis

    def _group(self, name: GroupName) -> str:
        """A group of this rank, known by name."""
        return self._named(self.mesh.communicator(name))

    def _named(self, over: Communicator) -> str:
        """Make a group of the units' collectives known by name as long as the engine lives, and how it is used."""
        name = f"{over.name} of engine {id(self)}"
        if name in self._names:
            return name
        self._names.add(name)
        named = ExitStack()
        named.enter_context(registered({name: over}))
        weakref.finalize(self, named.close)
        return name

    def _adopt_parameters(self) -> None:
        """Put the stores' parameters where the plain model has its own; every one of this stage exactly once."""
        held = {name: parameter for store in self.stores for name, parameter in store.parameters.items()}
        for name, parameter in held.items():
            path, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(path), leaf, parameter)
        if self.plan.arch.tie_embeddings and "embedding.weight" in held:
            self.model.head.weight = held["embedding.weight"]
