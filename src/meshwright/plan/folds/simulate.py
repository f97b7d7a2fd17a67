"""The time of a step: the longest path through its wait-for graph.

The compute stream of a rank is the order of its program; each communicator, and each direction of a link, is a stream
of its own. What a rank spends in a wait is exposed: communication that no computation hid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.plan.action import COMPUTE, Action, Op
from meshwright.plan.folds.deadlock import order
from meshwright.plan.folds.graph import Graph
from meshwright.plan.program import Program

Durations = Callable[[Program, Action], float]
"""Seconds of a compute or an update on its rank, or of the transfer that a launch begins, alone on its link."""


@dataclass(frozen=True, slots=True)
class Span:
    """When a rank is in an action, in seconds from the start of the step; a transfer ends in its wait."""

    index: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    step_seconds: float
    spans: dict[int, tuple[Span, ...]]  # by rank, one an action
    busy_seconds: dict[int, float]  # by rank, in units' computations
    compute_seconds: float  # when the last of them ends

    @property
    def bubble(self) -> float:
        """The part of all ranks' time, until the last compute ends, that is not computation, 0 to 1."""
        if not self.compute_seconds:
            return 0.0
        return 1.0 - sum(self.busy_seconds.values()) / (len(self.busy_seconds) * self.compute_seconds)


def simulate(graph: Graph, durations: Durations) -> Simulation:
    """Run the graph. Raises ValueError where the step hangs."""
    start, end = [0.0] * len(graph.after), [0.0] * len(graph.after)
    lasts = _lengths(graph, durations)
    reached = order(graph)
    if len(reached) != len(graph.after):
        raise ValueError("a step that hangs has no duration")
    for node in reached:
        start[node] = max((end[each] for each in graph.after[node]), default=0.0)
        end[node] = start[node] + lasts[node]
    spans, busy, computed = {}, {}, 0.0
    for rank, program in graph.programs.items():
        first = graph.first[rank]
        spans[rank] = _spans(program, first, start, end)
        computes = [first + index for index, action in enumerate(program.actions) if action.op in COMPUTE]
        busy[rank] = sum(lasts[node] for node in computes)
        computed = max([computed, *(end[node] for node in computes)])
    return Simulation(max(end, default=0.0), spans, busy, computed)


def _lengths(graph: Graph, durations: Durations) -> list[float]:
    """Seconds of every node: issuing a launch takes none, its instance does."""
    local = COMPUTE | {Op.UPDATE}
    lengths = [
        durations(program, action) if action.op in local else 0.0
        for program in graph.programs.values()
        for action in program.actions
    ]
    for instance in graph.instances:
        rank, index = instance.issued[0]
        program = graph.programs[rank]
        lengths.append(durations(program, program.actions[index]))
    return lengths


def _spans(program: Program, first: int, start: list[float], end: list[float]) -> tuple[Span, ...]:
    """A wait is entered when the action before it ends."""
    spans = []
    free = 0.0
    for index, action in enumerate(program.actions):
        node = first + index
        spans.append(Span(index, free if action.op is Op.WAIT else start[node], end[node]))
        free = end[node]
    return tuple(spans)
