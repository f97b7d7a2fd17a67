"""Live memory of a rank over a step: the running sum of what its actions make and free.

    states        parameters, optimizer, master: there before the step and after it, exact to the byte
    buckets       whole parameters (ZeRO-3), gradients and their shards: exact to the byte
    activations   what units keep for their backward: the table of `arch/activations.py`
    passing       values and cotangents between units and stages, gradients on their way into a bucket, what arrives in
                  a direct reduce-scatter, logits and their gradients while the head runs: formulas

The buffers are those of the hazards; here each has a size. Working memory inside kernels is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from meshwright.arch.activations import Setting, saved
from meshwright.arch.arithmetic import OperationKind, operations
from meshwright.arch.tensors import UnitKind
from meshwright.config.choices import Documents, OptimizerKind
from meshwright.plan.action import Action, Kind, Op, What
from meshwright.plan.buckets import Bucket, sharding_group
from meshwright.plan.folds.touches import Buffer, Kept, Memory, Touches
from meshwright.plan.folds.traffic import Operation, Transport, border_elements, transfer
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program, program


class Category(StrEnum):
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    MASTER = "master"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    BUFFERS = "buffers"


Sizes = Mapping[Category, int]
"""Bytes by category."""


@dataclass(frozen=True, slots=True)
class Event:
    """`change` bytes are taken (or given back, below 0) at an action."""

    index: int
    category: Category
    change: int


@dataclass(frozen=True)
class Timeline:
    """`states` are live before the first action; `events` are in the order in which they happen."""

    states: Sizes
    events: tuple[Event, ...]

    @property
    def peak_bytes(self) -> int:
        return sum(self.at_peak.values())

    @property
    def peak_index(self) -> int:
        """The action at which most is live; -1: before the first."""
        return self._peak[0]

    @property
    def at_peak(self) -> Sizes:
        """Bytes of every category when most is live."""
        return self._peak[1]

    @cached_property
    def largest(self) -> Sizes:
        """The largest size of each category, whenever that is."""
        live, most = dict(self.states), dict(self.states)
        for event in self.events:
            live[event.category] += event.change
            most[event.category] = max(most[event.category], live[event.category])
        return most

    @cached_property
    def _peak(self) -> tuple[int, Sizes]:
        live = dict(self.states)
        total = most = sum(live.values())
        index, sizes = -1, dict(live)
        for event in self.events:
            live[event.category] += event.change
            total += event.change
            if total > most:
                most, index, sizes = total, event.index, dict(live)
        return index, sizes


def memory(
    plan: Plan,
    rank: int,
    kind: Kind = Kind.TRAIN,
    transport: Transport = Transport.DIRECT,
    fused_norms: bool = False,
) -> Timeline:
    """What is live on `rank` over one step. `fused_norms`: norms are single kernels, as on CUDA."""
    steps = program(plan, rank, kind)
    run = _Run(plan, steps, transport, _Sizes(plan, steps, fused_norms))
    for index, action in enumerate(steps.actions):
        run.step(index, action)
    return Timeline(states(plan, steps), tuple(run.events))


def states(plan: Plan, steps: Program) -> Sizes:
    """Bytes that live as long as the run: parameters (a shard at ZeRO-3), moments and master copies (from ZeRO-1)."""
    sizes = dict.fromkeys(Category, 0)
    for bucket in steps.buckets:
        part = _shard(plan, bucket)
        kept = part if plan.sharding.stage == 3 else bucket.numel
        sizes[Category.PARAMETERS] += kept * plan.precision.compute.num_bytes
        if bucket.trainable:
            owned = part * plan.precision.master.num_bytes
            sizes[Category.OPTIMIZER] += _moments(plan) * owned
            sizes[Category.MASTER] += owned if plan.precision.has_master else 0
    return sizes


class _Run:
    """Actions into events: launches take memory when launched and give it back when waited for."""

    def __init__(self, plan: Plan, steps: Program, transport: Transport, sizes: _Sizes) -> None:
        self._plan, self._steps, self._transport, self._sizes = plan, steps, transport, sizes
        self._memory = Memory(plan, steps)
        self._here = set(self._memory.at_start())
        self._in_place = plan.sharding.stage < 2  # a sum stays where the gradient was
        self.events: list[Event] = []

    def step(self, index: int, action: Action) -> None:
        if action.op is Op.WAIT:
            launched = self._steps.actions[action.of]
            self._settle(index, self._memory.touches(launched))
            self._change(index, self._arriving(launched), -1)
            return
        touches = self._memory.touches(action)
        if action.launches:
            self._make(index, (each for each in (*touches.makes, *touches.adds) if not self._turns(each)))
            self._change(index, self._arriving(action), 1)
        elif action.op in (Op.FORWARD, Op.RECOMPUTE):
            self._free(index, touches.frees)  # the value that enters is the first thing that is kept
            self._pass(index, action, touches)
        else:
            self._pass(index, action, touches)
            self._free(index, touches.frees)

    def _pass(self, index: int, action: Action, touches: Touches) -> None:
        self._make(index, (*touches.makes, *touches.adds))
        passing = self._sizes.passing(action)
        self._change(index, passing, 1)
        self._change(index, passing, -1)

    def _settle(self, index: int, touches: Touches) -> None:
        self._free(index, touches.frees)
        self._make(index, (*touches.makes, *touches.adds))

    def _turns(self, buffer: Buffer) -> bool:
        """Whether a buffer takes the place of what its launch frees, and so appears only at the wait."""
        return self._in_place and buffer.what is Kept.SUM

    def _make(self, index: int, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            if buffer not in self._here:
                self._here.add(buffer)
                self._change(index, self._sizes.of(buffer), 1)

    def _free(self, index: int, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            self._here.remove(buffer)
            self._change(index, self._sizes.of(buffer), -1)

    def _arriving(self, launched: Action) -> dict[Category, int]:
        """Shards of others on their way in: a direct reduce-scatter holds all of them until it adds them up."""
        moved = transfer(self._plan, self._steps, launched)
        if self._transport is not Transport.DIRECT or moved is None or moved.operation is not Operation.REDUCE_SCATTER:
            return {}
        return {Category.BUFFERS: moved.payload_bytes // moved.ranks * (moved.ranks - 1)}

    def _change(self, index: int, sizes: Sizes, sign: int) -> None:
        self.events.extend(Event(index, category, sign * size) for category, size in sizes.items() if size)


class _Sizes:
    """How large each buffer of a program is."""

    def __init__(self, plan: Plan, steps: Program, fused_norms: bool) -> None:
        self._plan, self._buckets = plan, steps.buckets
        self._compute, self._reduce = plan.precision.compute.num_bytes, plan.precision.reduce.num_bytes
        sequence = plan.data.sequence_length // plan.degrees.cp
        masked = plan.data.documents is Documents.MASKED
        self._setting = Setting(plan.batch.micro, sequence, masked, fused_norms)
        self._hidden = border_elements(plan) * self._compute
        units = sorted({unit for bucket in steps.buckets for unit in bucket.units})
        self._graphs = {unit: self._graph(unit) for unit in units}
        self._own = {unit: self._own_gradients(unit) for unit in units}

    def of(self, buffer: Buffer) -> Sizes:
        match buffer.what:
            case Kept.VALUE:
                return {Category.ACTIVATIONS: self._hidden}
            case Kept.COTANGENT:
                return {Category.BUFFERS: self._hidden}
            case Kept.GRAPH:
                return self._graphs[buffer.first]
            case Kept.STASH:
                return {Category.ACTIVATIONS: self._stash(buffer.first)}
            case Kept.PARAMETERS:
                return {Category.PARAMETERS: self._buckets[buffer.first].numel * self._compute}
            case Kept.GRADIENT:
                return {Category.GRADIENTS: self._buckets[buffer.first].numel * self._reduce}
            case Kept.SUM:
                bucket = self._buckets[buffer.first]
                left = _shard(self._plan, bucket) if self._plan.sharding.stage >= 2 else bucket.numel
                return {Category.GRADIENTS: left * self._reduce}
            case _:
                return {}

    def passing(self, action: Action) -> Sizes:
        """What lives only inside an action: the gradients of its parameters, logits and their gradients."""
        sizes = dict.fromkeys((Category.BUFFERS, Category.LOGITS), 0)
        if action.op in (Op.BACKWARD, Op.WEIGHT) and not action.split:
            sizes[Category.BUFFERS] = self._own[action.unit]
        if action.what is not What.LOSS and self._plan.arch.unit_kind(action.unit) is UnitKind.HEAD:
            logits, precise = self._setting.tokens * self._plan.arch.vocab, max(4, self._compute)
            if action.op is Op.FORWARD:
                sizes[Category.LOGITS] = logits * (self._compute + (4 if self._compute < 4 else 0))
            elif action.op is Op.BACKWARD:
                sizes[Category.LOGITS] = 2 * logits * precise  # of the log-probabilities and of the logits
        return sizes

    def _graph(self, unit: int) -> Sizes:
        sizes = dict.fromkeys((Category.ACTIVATIONS, Category.LOGITS), 0)
        for each in saved(self._plan.arch, unit, self._setting):
            category = Category.LOGITS if each.name.startswith("loss.") else Category.ACTIVATIONS
            sizes[category] += each.elements * each.role.num_bytes(self._plan.precision.compute)
        return sizes

    def _own_gradients(self, unit: int) -> int:
        segments = (each for b in self._buckets if unit in b.units and b.trainable for each in b.segments)
        return sum(segment.numel for segment in segments) * self._compute

    def _stash(self, unit: int) -> int:
        """(input, gradient of the output) of every product."""
        done = operations(self._plan.arch, unit, self._setting.tokens, self._setting.sequence)
        kept = sum(each.read + each.written for each in done if each.kind is OperationKind.MATMUL)
        return kept * self._compute


def _shard(plan: Plan, bucket: Bucket) -> int:
    """Elements of a bucket that a rank updates."""
    ways = sharding_group(plan, bucket.replicas).size if plan.sharding.stage else 1
    return bucket.numel // ways


def _moments(plan: Plan) -> int:
    """Tensors the optimizer keeps an element."""
    match plan.optimizer.kind:
        case OptimizerKind.ADAMW:
            return 2
        case OptimizerKind.SGD:
            return 0
        case OptimizerKind.MUON:
            raise ValueError("the memory of muon is not known: its cut by whole matrices is not built")
