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

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from meshwright.arch.passing import (
    Moments,
)
from meshwright.plan.action import COMPUTE, Action, Kind, Op
from meshwright.plan.category import Category as Category
from meshwright.plan.folds.setting import setting_of
from meshwright.plan.folds.sizes import Sizes, UnitSizes, states, visitors
from meshwright.plan.folds.touches import Buffer, Kept, Memory, Touches
from meshwright.plan.folds.traffic import Operation, Transport, transfer
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program, program
from meshwright.plan.strategies.expert import Routed, even_exchange, everywhere


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
    sizes = UnitSizes(plan, steps, setting, routed if plan.degrees.ep > 1 else None)
    run = _Run(plan, steps, transport, sizes)
    for index, action in enumerate(steps.actions):
        run.step(index, action)
    return Timeline(states(plan, steps), tuple(run.events))


class _Run:
    """Actions into events: launches take memory when launched and give it back when waited for."""

    def __init__(self, plan: Plan, steps: Program, transport: Transport, sizes: UnitSizes) -> None:
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
