"""Seconds of a step by part, on this rank, between the actions of its program. The parts add up to the step.

    compute     units, without the collectives inside them              optimizer   norm and updates
    tp, cp, ep  those, by axis; tp: sums over the tensor axis too       dp          sums, gathers and waits of replicas
    pp, bubble  waits for messages: one lasts as long as the shortest wait for one in the step, the rest is a bubble
    data        reading the batch                                       other       what lies between

A wait counts for what is waited for. On a device that works asynchronously launches are no work: nothing is told apart.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean, median

from meshwright.layout.groups import GroupName
from meshwright.plan.action import COMPUTE, Action, Op

__all__ = ["CAUSES", "COMPUTE_PARTS", "STEP_PARTS", "Stopwatch", "by_cause"]

STEP_PARTS = ("compute", "dp", "tp", "pp", "cp", "ep", "bubble", "optimizer", "data", "other")
"""As a price has them."""

COMPUTE_PARTS: Mapping[Op, str] = {
    Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.WEIGHT: "backward", Op.RECOMPUTE: "recompute",
}  # fmt: skip
"""What `compute` is made of: what an operation counts for. Selective recomputation is a part of the backward."""

CAUSES: Mapping[str, tuple[str, ...]] = {
    "computation": ("compute", "other"),
    "tensor": ("tp",),
    "context": ("cp",),
    "experts": ("ep",),
    "replicas": ("dp",),
    "stages": ("pp", "bubble"),
    "optimizer": ("optimizer",),
}
"""What differs between machines as one, and the parts that it means."""

_KEPT = 50
_INSIDE = {GroupName.TP: "tp", GroupName.CP: "cp", GroupName.EP: "ep"}


def by_cause(parts: Mapping[str, float]) -> dict[str, float]:
    """Parts of a step, by cause."""
    return {name: sum(parts[part] for part in causes) for name, causes in CAUSES.items()}


class Stopwatch:
    """Seconds of steps by part. `waited`: seconds that this rank has waited inside units so far, by group."""

    def __init__(self, waited: Callable[[], Mapping[GroupName, float]] = dict) -> None:
        self._waited = waited
        self._done: deque[dict[str, float]] = deque(maxlen=_KEPT)
        self._clear()

    @property
    def steps(self) -> int:
        """How many are kept."""
        return len(self._done)

    @property
    def parts(self) -> dict[str, float]:
        """The mean of the last steps: parts of a mean add up to it."""
        return {name: self._mean(name) for name in STEP_PARTS}

    @property
    def computed(self) -> dict[str, float]:
        """What `compute` of the mean step is made of."""
        return {name: self._mean(name) for name in COMPUTE_PARTS.values()}

    @property
    def seconds(self) -> dict[str, float]:
        """Of each cause the median over the last steps."""
        steps = [by_cause(step) for step in self._done]
        return {name: median(step[name] for step in steps) if steps else 0.0 for name in CAUSES}

    def over(self, observer: Callable[[Action], None]) -> Callable[[Action], None]:
        """An observer that keeps the time and asks `observer` too."""

        def before(action: Action) -> None:
            self._turn(action)
            observer(action)

        return before

    def read(self, seconds: float) -> None:
        """Reading the batch of this step took so long."""
        self._spent["data"] += seconds

    def end(self, count: bool = True, seconds: float = 0.0) -> None:
        """A step is over, after `seconds` in all; one that pays for what happens once is not counted."""
        self._turn(None)
        if self._receives:
            messages = len(self._receives) * min(self._receives)
            self._spent["pp"] += messages
            self._spent["bubble"] += sum(self._receives) - messages
        self._spent["other"] += max(seconds - sum(self._spent.values()), 0.0)
        if count:
            self._done.append(self._spent | self._computed)
        self._clear()

    def _mean(self, name: str) -> float:
        return fmean(step[name] for step in self._done) if self._done else 0.0

    def _clear(self) -> None:
        self._spent = dict.fromkeys(STEP_PARTS, 0.0)
        self._computed = dict.fromkeys(COMPUTE_PARTS.values(), 0.0)
        self._ops: list[Op] = []
        self._receives: list[float] = []
        self._now: tuple[Action, float, Mapping[GroupName, float]] | None = None

    def _turn(self, action: Action | None) -> None:
        now, waited = time.perf_counter(), dict(self._waited())
        if self._now is not None:
            before, begin, inside = self._now
            self._count(before, now - begin, {name: end - inside.get(name, 0.0) for name, end in waited.items()})
        if action is not None:
            self._now = action, now, waited
            self._ops.append(action.op)

    def _count(self, action: Action, seconds: float, inside: Mapping[GroupName, float]) -> None:
        if action.op in COMPUTE:
            computed = seconds - sum(inside.values())
            self._spent["compute"] += computed
            self._computed[COMPUTE_PARTS[action.op]] += computed
            for group, waited in inside.items():
                self._spent[_INSIDE[group]] += waited
        elif action.op is Op.WAIT and self._op(action.of) is Op.RECEIVE:
            self._receives.append(seconds)
        else:
            self._spent[self._part(action)] += seconds

    def _op(self, index: int) -> Op:
        return self._ops[index] if 0 <= index < len(self._ops) else Op.WAIT

    def _part(self, action: Action) -> str:
        if action.op in (Op.UPDATE, Op.NORM):
            return "optimizer"
        if action.group is None:
            return "other"
        if action.group is GroupName.PP or action.op in (Op.SEND, Op.RECEIVE):
            return "pp"
        return _INSIDE.get(action.group, "dp")
