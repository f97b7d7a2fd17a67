"""Hazards: what a program does wrong with memory. A program without any can only be slow, or wait for ever.

    launch ............ wait      no buffer of the launch is read, written or freed in between
    read                          only what is there: received, gathered, computed, summed
    make, free                    once each; nothing but parameters and figures is left at the end

Neither the wait-for graph nor the ledger sees these: a gradient bucket that is written while its sum travels gives
wrong gradients, silently.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.plan.action import Action, Op
from meshwright.plan.folds.touches import Buffer, Memory, Touches
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program


@dataclass(frozen=True, slots=True)
class Hazard:
    """What goes wrong at the action `index` (the number of actions: at the end)."""

    index: int
    text: str

    def __str__(self) -> str:
        return f"action {self.index}: {self.text}"


def hazards(plan: Plan, program: Program) -> tuple[Hazard, ...]:
    """All hazards of `program`, in order; the first is the one to look at."""
    watch = _Watch(plan, program)
    for index, action in enumerate(program.actions):
        watch.step(index, action)
    watch.end(len(program.actions))
    return tuple(watch.found)


class _Watch:
    def __init__(self, plan: Plan, program: Program) -> None:
        self._memory = Memory(plan, program)
        self._actions = program.actions
        self._here = set(self._memory.at_start())
        self._held: dict[Buffer, int] = {}  # buffer -> the launch that it belongs to
        self._open: dict[int, Touches] = {}
        self.found: list[Hazard] = []

    def step(self, index: int, action: Action) -> None:
        if action.op is Op.WAIT:
            self._end_launch(index, action)
            return
        touches = self._memory.touches(action)
        self._check(index, action, touches)
        if action.launches:
            self._open[index] = touches
            for buffer in (*touches.reads, *touches.frees, *touches.makes, *touches.adds):
                self._held[buffer] = index
        else:
            self._settle(touches)

    def end(self, index: int) -> None:
        for launch in self._open:
            self._report(index, f"{_named(launch, self._actions[launch])} was never waited for")
        left = [buffer for buffer in self._here if not self._memory.may_remain(buffer)]
        for text in sorted(map(str, left)):
            self._report(index, f"{text} is left")

    def _end_launch(self, index: int, action: Action) -> None:
        touches = self._open.pop(action.of, None)
        if touches is None:
            self._report(index, f"waits for action {action.of}, which is not under way")
            return
        for buffer in [each for each, launch in self._held.items() if launch == action.of]:
            del self._held[buffer]
        self._settle(touches)

    def _settle(self, touches: Touches) -> None:
        self._here.difference_update(touches.frees)
        self._here.update(touches.makes, touches.adds)

    def _check(self, index: int, action: Action, touches: Touches) -> None:
        doing = _named(index, action)
        every: Iterable[Buffer] = (*touches.reads, *touches.frees, *touches.makes, *touches.adds, *touches.forbids)
        for buffer in every:
            if buffer in self._held:
                launch = self._held[buffer]
                under_way = _named(launch, self._actions[launch])
                self._report(index, f"{doing} touches {buffer} while {under_way} is under way")
        for buffer in (*touches.reads, *touches.frees):
            if buffer not in self._here and buffer not in self._held:
                self._report(index, f"{doing} needs {buffer}, which is not there")
        for buffer in (*touches.makes, *touches.forbids):
            if buffer in self._here and buffer not in self._held:
                self._report(index, f"{doing} comes too late, or twice: {buffer} is there already")

    def _report(self, index: int, text: str) -> None:
        self.found.append(Hazard(index, text))


def _named(index: int, action: Action) -> str:
    return f"{action.op.value} ({index})"
