"""Live memory of a rank over a step: the running sum of what its actions make and free.

    states        parameters, optimizer, master: there before the step and after it, exact to the byte
    buckets       whole parameters (ZeRO-3), gradients and their shards: exact to the byte
    activations   what units keep for their backward: the table of `arch/activations.py`
    rows          what the model knows of its tokens, while a micro-batch is at work: rotary tables, masks, keys
    passing       values and cotangents between units and stages, what arrives in a direct reduce-scatter, and what a
                  unit holds only while it runs: the fullest moments of `arch/passing.py`

The buffers are those of the hazards; here each has a size. Working memory inside kernels is not counted, but for
the tiles of attention where the number of threads is known.

    backward of a unit      passing, before     gradient buckets made     passing, after     graph given back
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from meshwright.arch.activations import Setting, kept_bytes
from meshwright.arch.arch import Arch
from meshwright.arch.passing import (
    Gradients,
    Moments,
    backward_passing,
    forward_passing,
    split_passing,
    stash_bytes,
    weight_passing,
)
from meshwright.config.choices import Dtype, Offload
from meshwright.layout.groups import GroupName
from meshwright.plan.action import COMPUTE, Action, Kind, Op
from meshwright.plan.buckets import Bucket, in_pieces, sharding_group
from meshwright.plan.category import Category as Category
from meshwright.plan.folds.setting import narrowed as narrowed
from meshwright.plan.folds.setting import setting_of
from meshwright.plan.folds.touches import Buffer, Kept, Memory, Touches
from meshwright.plan.folds.traffic import Operation, Transport, border_elements, transfer
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program, program
from meshwright.plan.strategies.expert import Routed, even_exchange, everywhere

Sizes = Mapping[Category, int]
"""Bytes by category."""


class Event(NamedTuple):
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
    kernel_threads: int = 0,
    routed: Routed | None = None,
) -> Timeline:
    """What is live on `rank` over one step. `fused_norms`: norms are single kernels, as on CUDA.

    `routed`: the rows that units with experts on several ranks exchange; without it loads are even.
    `kernel_threads`: threads of a CPU's kernels, of which each has tiles of scores while attention is differentiated;
    0: none are counted.
    An eager run keeps no more of an RMSNorm on a CPU either (`parallel/norms.py`).
    """
    steps = program(plan, rank, kind)
    at = plan.degrees.coordinates(rank)
    if routed is None and plan.degrees.ep > 1:
        routed = everywhere(even_exchange(plan, at.ep))
    setting = setting_of(plan, at, transport, fused_norms, kernel_threads)
    sizes = _Sizes(plan, steps, setting, routed if plan.degrees.ep > 1 else None)
    run = _Run(plan, steps, transport, sizes)
    for index, action in enumerate(steps.actions):
        run.step(index, action)
    return Timeline(states(plan, steps), tuple(run.events))


def states(plan: Plan, steps: Program) -> Sizes:
    """Bytes that live as long as the run: parameters (a shard at ZeRO-3), moments and master copies (from ZeRO-1).

    What is offloaded lives in other memory.
    """
    sizes = dict.fromkeys(Category, 0)
    offload = plan.execution.offload
    for bucket in steps.buckets:
        part = _shard(plan, bucket)
        cut = in_pieces(plan, bucket)
        kept = 0 if cut and offload is Offload.PARAMS else part if cut else bucket.numel
        sizes[Category.PARAMETERS] += kept * plan.precision.compute.num_bytes
        if bucket.trainable and offload is not Offload.OPTIMIZER:
            owned = part * plan.precision.master.num_bytes
            sizes[Category.OPTIMIZER] += plan.optimizer.num_moments * owned
            sizes[Category.MASTER] += owned if plan.precision.has_master else 0
    return sizes


def visitors(plan: Plan, bucket: Bucket) -> Sizes:
    """What of an offloaded bucket is on the device for its update."""
    owned = _shard(plan, bucket) * plan.precision.master.num_bytes
    match plan.execution.offload:
        case Offload.OPTIMIZER:
            masters = owned if plan.precision.has_master else 0
            return {Category.OPTIMIZER: plan.optimizer.num_moments * owned, Category.MASTER: masters}
        case Offload.PARAMS if in_pieces(plan, bucket) and not plan.precision.has_master:
            return {Category.PARAMETERS: owned}
        case _:
            return {}


class _Run:
    """Actions into events: launches take memory when launched and give it back when waited for."""

    def __init__(self, plan: Plan, steps: Program, transport: Transport, sizes: _Sizes) -> None:
        self._plan, self._steps, self._transport, self._sizes = plan, steps, transport, sizes
        self._memory = Memory(plan, steps)
        self._here = set(self._memory.at_start())
        self._in_place = plan.sharding.stage < 2  # a sum stays where the gradient was
        used = [(action.micro, index) for index, action in enumerate(steps.actions) if action.op in COMPUTE]
        self._updated = [action.bucket for action in steps.actions if action.op is Op.UPDATE]
        self._last_use = dict(used)
        self._first_use = dict(reversed(used))
        self.events: list[Event] = []

    def step(self, index: int, action: Action) -> None:
        if self._first_use.get(action.micro) == index:
            self._change(index, self._sizes.rows, 1)
        if action.op is Op.WAIT:
            self._settle(index, self._steps.actions[action.of])
        elif action.launches:
            touches = self._memory.touches(action)
            self._make(index, (each for each in (*touches.makes, *touches.adds) if not self._turns(each)))
            self._change(index, self._arriving(action), 1)
        else:
            self._run(index, action, self._memory.touches(action))
        if self._last_use.get(action.micro) == index:
            self._change(index, self._sizes.rows, -1)

    def _run(self, index: int, action: Action, touches: Touches) -> None:
        of_head = action.op in COMPUTE and action.unit == self._plan.arch.head_unit
        category = Category.LOGITS if of_head else Category.BUFFERS
        if action.op in (Op.FORWARD, Op.RECOMPUTE):
            self._free(index, touches.frees)  # the value that enters is the first thing that is kept
            self._make(index, (*touches.makes, *touches.adds))
            again = self._sizes.hidden if action.op is Op.RECOMPUTE else 0  # what leaves it is made again, for nobody
            self._pass(index, self._sizes.of_forward(action) + again, category)
        elif action.op in (Op.BACKWARD, Op.WEIGHT):
            moments = self._sizes.of_backward(action)
            self._pass(index, moments.before, category)
            self._add(index, action, touches.adds, moments, category)
            self._free(index, touches.frees)  # what they held becomes what is made
            self._make(index, touches.makes)
        else:
            self._make(index, (*touches.makes, *touches.adds))
            if action.op is Op.UPDATE:
                self._visit(index, action)
            self._pass(index, self._sizes.of_update(action))
            self._free(index, touches.frees)

    def _add(self, index: int, action: Action, buffers: Iterable[Buffer], moments: Moments, category: Category) -> None:
        """The buckets of a unit's gradients, one by one where autograd made what they take, some first where experts
        have one of their own."""
        if moments.between:
            self._make(index, self._sizes.written_first(buffers))
            self._pass(index, moments.between, category)
        left = moments.after
        for buffer in buffers:
            self._make(index, (buffer,))
            if moments.of_autograd:
                self._pass(index, left, category)
                left -= self._sizes.of_autograd(action.unit, buffer)
        if not moments.of_autograd:
            self._pass(index, left, category)

    def _visit(self, index: int, action: Action) -> None:
        """Offloaded buckets around an update: the next one comes, the one before it goes, the last goes at once."""
        place, last = self._updated.index(action.bucket), len(self._updated) - 1
        coming = [place + 1] if place else [0, 1]
        leaving = ([place - 1] if place else []) + ([place] if place == last else [])
        for places, sign in ((coming, 1), (leaving, -1)):
            for each in places:
                if each <= last:
                    self._change(index, visitors(self._plan, self._steps.buckets[self._updated[each]]), sign)

    def _pass(self, index: int, num_bytes: int, category: Category = Category.BUFFERS) -> None:
        if num_bytes > 0:
            self._change(index, {category: num_bytes}, 1)
            self._change(index, {category: num_bytes}, -1)

    def _settle(self, index: int, launched: Action) -> None:
        touches, arriving = self._memory.touches(launched), self._arriving(launched)
        made = (*touches.makes, *touches.adds)
        if self._in_place:
            self._free(index, touches.frees)
            self._make(index, made)
        else:  # a shard is copied out of the gradient, which is freed then
            self._make(index, made)
            self._free(index, touches.frees)
        self._change(index, arriving, -1)

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
        if self._transport is not Transport.DIRECT:
            return {}
        moved = transfer(self._plan, self._steps, launched)
        if moved is None or moved.operation is not Operation.REDUCE_SCATTER:
            return {}
        return {Category.BUFFERS: moved.payload_bytes // moved.ranks * (moved.ranks - 1)}

    def _change(self, index: int, sizes: Sizes, sign: int) -> None:
        for category, size in sizes.items():
            if size:
                self.events.append(Event(index, category, sign * size))


class _Sizes:
    """How large each buffer of a program is."""

    def __init__(self, plan: Plan, steps: Program, setting: Setting, routed: Routed | None) -> None:
        self._plan, self._buckets, self._setting, self._routed = plan, steps.buckets, setting, routed
        self._compute, self._reduce = plan.precision.compute.num_bytes, plan.precision.reduce.num_bytes
        self._arch = narrowed(plan.arch, plan.degrees.tp)
        self._in_place = not plan.execution.compile
        self.hidden = border_elements(plan) * self._compute
        self._graphs: dict[tuple[int, Setting], Sizes] = {}
        self._forwards: dict[tuple[int, bool, Setting], int] = {}
        self._backwards: dict[tuple[Op, int, bool, Setting], Moments] = {}
        self.rows = {Category.BUFFERS: rows_bytes(plan.arch, self._setting, plan.precision.compute)}

    def of(self, buffer: Buffer) -> Sizes:
        match buffer.what:
            case Kept.VALUE:
                return {Category.ACTIVATIONS: self.hidden}
            case Kept.COTANGENT:
                return {Category.BUFFERS: self.hidden}
            case Kept.GRAPH:
                return self._graph(buffer.first, self._setting_of(buffer.first, buffer.micro))
            case Kept.STASH:
                setting = self._setting_of(buffer.first, buffer.micro)
                stash = stash_bytes(self._arch, buffer.first, setting, self._plan.precision.compute)
                return {Category.ACTIVATIONS: stash}
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

    def _setting_of(self, unit: int, micro: int) -> Setting:
        """Of one micro-batch, whose rows the experts of a unit get."""
        if self._routed is None or not self._plan.arch.is_routed_unit(unit):
            return self._setting
        return replace(self._setting, arriving=sum(self._routed[unit, micro].received))

    def _graph(self, unit: int, setting: Setting) -> Sizes:
        if (unit, setting) not in self._graphs:
            self._graphs[unit, setting] = graph_sizes(self._arch, unit, setting, self._plan.precision.compute)
        return self._graphs[unit, setting]

    def of_forward(self, action: Action) -> int:
        setting, keeps = self._setting_of(action.unit, action.micro), self._in_place and action.keep
        key = action.unit, keeps, setting  # a forward that keeps nothing lets its logits go
        if key not in self._forwards:
            compute = self._plan.precision.compute
            self._forwards[key] = forward_passing(self._arch, action.unit, setting, compute, keeps)
        return self._forwards[key]

    def of_backward(self, action: Action) -> Moments:
        key = action.op, action.unit, action.split, self._setting_of(action.unit, action.micro)
        if key not in self._backwards:
            self._backwards[key] = self._moments(*key)
        return self._backwards[key]

    def _moments(self, op: Op, unit: int, split: bool, setting: Setting) -> Moments:
        arch, compute = self._arch, self._plan.precision.compute
        if op is Op.WEIGHT:
            return weight_passing(arch, unit, setting, compute, self._gradients(unit))
        if split:
            return Moments(split_passing(arch, unit, setting, compute), 0)
        return backward_passing(arch, unit, setting, compute, self._gradients(unit))

    def written_first(self, gradients: Iterable[Buffer]) -> list[Buffer]:
        """Of a block with experts on an axis of their own: their gradients, or all others where some are shared."""
        assert self._plan.arch.experts is not None
        theirs = self._plan.arch.experts.shared == 0
        return [each for each in gradients if (self._buckets[each.first].replicas is GroupName.EXPERT) == theirs]

    def of_autograd(self, unit: int, buffer: Buffer) -> int:
        """Gradients of a unit that a bucket takes."""
        if buffer.what is not Kept.GRADIENT:
            return 0
        bucket = self._buckets[buffer.first]
        return sum(each.numel for each in bucket.segments if unit in each.owner.tensor.readers) * self._compute

    def of_update(self, action: Action) -> int:
        """Gradients on their way out of a bucket in the master's dtype."""
        precision = self._plan.precision
        if action.op is Op.UPDATE and precision.reduce is not precision.master:
            return _shard(self._plan, self._buckets[action.bucket]) * precision.master.num_bytes
        return 0

    def _gradients(self, unit: int) -> Gradients:
        segments = (each for b in self._buckets if unit in b.units and b.trainable for each in b.segments)
        own = sum(segment.numel for segment in segments) * self._compute
        return Gradients(self._in_place, self._reduce, own)


def rows_bytes(arch: Arch, setting: Setting, compute: Dtype) -> int:
    """Keys of dropout, rotary tables and masks of one micro-batch: there from its first unit on to its last."""
    alike = setting.sequences if setting.masked else 1
    tables = alike * setting.sequence * arch.head_dim * max(4, compute.num_bytes) if arch.rope is not None else 0
    windows = {arch.window(layer) for layer in range(arch.layers)}
    each = alike * setting.queries * setting.whole
    masks = sum(setting.masked or 0 < window < setting.whole for window in windows) * each
    return 8 * setting.tokens + tables + masks


def graph_sizes(arch: Arch, unit: int, setting: Setting, compute: Dtype) -> Sizes:
    """What a unit of a tensor rank keeps for its backward; `arch` is narrowed to that rank."""
    sizes = dict.fromkeys((Category.ACTIVATIONS, Category.LOGITS), 0)
    for name, size in kept_bytes(arch, unit, setting, compute).items():
        sizes[Category.LOGITS if name.startswith("loss.") else Category.ACTIVATIONS] += size
    return sizes


def _shard(plan: Plan, bucket: Bucket) -> int:
    """Elements of a bucket that a rank updates."""
    ways = sharding_group(plan, bucket.replicas).size if plan.sharding.stage else 1
    return bucket.numel // ways
