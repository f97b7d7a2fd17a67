"""A step's timeline: what every stage computes when. Planned (simulated) and measured ones are drawn alike.

A bar is one slot of the schedule: its computes run one after another, recomputation belongs to the backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from meshwright.plan.action import COMPUTE, Action, Kind, Op
from meshwright.plan.folds.graph import Streams, build_graph, representatives
from meshwright.plan.folds.simulate import Durations, Span, simulate
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program, program
from meshwright.plan.resolve import unit_flops
from meshwright.plan.schedules import ScheduleFunction, Work
from meshwright.plan.stages import virtual_of, virtual_stages

__all__ = ["Bar", "Timeline", "flop_durations", "measured_durations", "measured_timeline", "planned_timeline"]

_WORK = {
    Op.FORWARD: Work.FORWARD,
    Op.RECOMPUTE: Work.BACKWARD,
    Op.BACKWARD: Work.BACKWARD,
    Op.WEIGHT: Work.WEIGHT,
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One slot, in seconds from the start of the step; `busy_seconds` of it are computation."""

    work: Work
    chunk: int
    micro: int
    start: float
    end: float
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The bars of each pipeline stage, in order."""

    stages: tuple[tuple[Bar, ...], ...]
    seconds: float

    @property
    def compute_seconds(self) -> float:
        """When the last compute of any stage ends: sums of gradients, their norm and the update may follow."""
        return max((bar.end for bars in self.stages for bar in bars), default=0.0)

    @property
    def bubble(self) -> float:
        """The part of all stages' time, until the last compute ends, that is not computation, 0 to 1.

        The papers' formulas end there too (Narayanan et al. 2021, arXiv:2104.04473; Qi et al. 2024, arXiv:2401.10241):
        what follows is no pipeline's, and is priced as sums and optimizer.
        """
        busy = sum(bar.busy_seconds for bars in self.stages for bar in bars)
        return 1.0 - busy / (len(self.stages) * self.compute_seconds) if busy else 0.0


def planned_timeline(plan: Plan, durations: Durations, schedule: ScheduleFunction | None = None) -> Timeline:
    """The timeline of a training step whose actions take as long as `durations` says."""
    graph = build_graph(plan, _of_stages(plan, schedule), Streams.COMMUNICATOR)
    done = simulate(graph, durations)
    return _timeline(plan, graph.programs, done.spans, done.step_seconds)


def flop_durations(plan: Plan) -> Durations:
    """Arithmetic alone, in seconds of an imaginary 1 FLOP/s: a backward does twice what its forward does, its two
    parts half each; everything else takes no time."""
    forward = unit_flops(plan.arch, plan.data.sequence_length)
    flops = [forward(unit) for unit in range(plan.arch.num_units)]
    parts = {Op.FORWARD: 1.0, Op.RECOMPUTE: 1.0, Op.WEIGHT: 1.0}

    def seconds(program: Program, action: Action) -> float:
        if action.op is Op.BACKWARD:
            return flops[action.unit] * (1.0 if action.split else 2.0)
        return flops[action.unit] * parts[action.op] if action.op in parts else 0.0

    return seconds


def measured_timeline(plan: Plan, programs: Mapping[int, Program], spans: Mapping[int, Sequence[Span]]) -> Timeline:
    """The timeline of what was measured on one rank of every stage; `spans` by rank, on one clock."""
    first = min(each[0].start for each in spans.values())
    last = max(each[-1].end for each in spans.values())
    moved = {rank: [Span(s.index, s.start - first, s.end - first) for s in each] for rank, each in spans.items()}
    return _timeline(plan, programs, moved, last - first)


def measured_durations(programs: Mapping[int, Program], spans: Mapping[int, Sequence[Span]]) -> Durations:
    """The mean measured seconds of each kind of compute, by stage, operation and unit; transfers take none."""
    seen: dict[tuple[int, Op, int], list[float]] = {}
    for rank, measured in spans.items():
        for span in measured:
            action = programs[rank].actions[span.index]
            if action.op in COMPUTE or action.op is Op.UPDATE:
                seen.setdefault(_kind(programs[rank], action), []).append(span.end - span.start)
    means = {kind: fmean(times) for kind, times in seen.items()}
    return lambda program, action: means.get(_kind(program, action), 0.0)


def _kind(program: Program, action: Action) -> tuple[int, Op, int]:
    return program.stage, action.op, action.unit if action.op is not Op.UPDATE else action.bucket


def _of_stages(plan: Plan, schedule: ScheduleFunction | None) -> dict[int, Program]:
    return {rank: program(plan, rank, Kind.TRAIN, schedule) for rank in representatives(plan)}


def _timeline(
    plan: Plan, programs: Mapping[int, Program], spans: Mapping[int, Sequence[Span]], seconds: float
) -> Timeline:
    by_stage = {program.stage: _bars(plan, program, spans[rank]) for rank, program in programs.items()}
    return Timeline(tuple(by_stage[stage] for stage in sorted(by_stage)), seconds)


def _bars(plan: Plan, program: Program, spans: Sequence[Span]) -> tuple[Bar, ...]:
    chunks = range(plan.pipeline.chunks)
    units = {chunk: virtual_stages(plan)[virtual_of(plan, program.stage, chunk)] for chunk in chunks}
    chunk_of = {unit: chunk for chunk, held in units.items() for unit in held}
    bars: list[Bar] = []
    for span in spans:
        action = program.actions[span.index]
        if action.op not in COMPUTE:
            continue
        here = _WORK[action.op], chunk_of[action.unit], action.micro
        start, busy = span.start, span.end - span.start
        if bars and (bars[-1].work, bars[-1].chunk, bars[-1].micro) == here:
            start, busy = bars[-1].start, busy + bars.pop().busy_seconds
        bars.append(Bar(*here, start, span.end, busy))
    return tuple(bars)
