"""Timelines: bars are slots, drawn as planned; what was measured becomes durations again."""

from __future__ import annotations

import pytest

from meshwright.arch.tensors import UnitKind
from meshwright.config.choices import Recompute, Schedule
from meshwright.plan.action import Action, Op
from meshwright.plan.folds.draw import draw_text
from meshwright.plan.folds.graph import Streams, build_graph
from meshwright.plan.folds.simulate import Durations, simulate
from meshwright.plan.folds.timeline import flop_durations, measured_durations, measured_timeline, planned_timeline
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program
from meshwright.plan.schedules import SCHEDULES
from tests.unit.plan.plans import make_plan


def seconds_of_blocks(plan: Plan) -> Durations:
    def seconds(program: Program, action: Action) -> float:
        if action.unit < 0 or plan.arch.unit_kind(action.unit) is not UnitKind.BLOCK:
            return 0.0
        whole = {Op.FORWARD: 1.0, Op.RECOMPUTE: 1.0, Op.BACKWARD: 2.0, Op.WEIGHT: 1.0}
        return 1.0 if action.split else whole.get(action.op, 0.0)

    return seconds


def drawn(plan: Plan, width: int = 0) -> str:
    return "\n".join(draw_text(planned_timeline(plan, seconds_of_blocks(plan)), width))


def test_one_forward_one_backward_drawn() -> None:
    assert drawn(make_plan(layers=3, pp=3, accumulation=3)) == "\n".join([
        "stage 0  F0 F1 F2 .  .  .  .  B0 -- .  B1 -- .  B2 --",
        "stage 1  .  F0 F1 .  .  B0 -- F2 B1 -- .  B2 -- .  .",
        "stage 2  .  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .  .  .",
    ])  # fmt: skip


def test_recomputation_belongs_to_the_backward_and_long_lines_are_wrapped() -> None:
    """A stage that waits for a cotangent recomputes meanwhile: B0 of stage 0 begins at 2 and ends at 7."""
    plan = make_plan(layers=2, pp=2, accumulation=2, recompute=Recompute.FULL)
    assert drawn(plan, 36) == "\n".join([
        "stage 0  F0 F1 B0 -- -- -- -- B1 --",
        "stage 1  .  F0 B0 -- -- F1 B1 -- --",
        "",
        "stage 0  -- --",
        "stage 1  .  .",
    ])  # fmt: skip


def test_chunks_are_told_apart() -> None:
    lines = drawn(make_plan(layers=6, pp=2, chunks=3, schedule=Schedule.INTERLEAVED, accumulation=2)).splitlines()
    assert lines[0].split()[2:8] == ["F0", "F1", "f0", "f1", "f0.2", "f1.2"]


@pytest.mark.parametrize("schedule", Schedule)
def test_bars_are_the_slots_of_the_schedule(schedule: Schedule) -> None:
    chunks = {Schedule.INTERLEAVED: 2, Schedule.ZB_V: 2}.get(schedule, 1)
    plan = make_plan(layers=6, pp=3, chunks=chunks, schedule=schedule, accumulation=4, recompute=Recompute.FULL)
    timeline = planned_timeline(plan, flop_durations(plan))
    for stage, bars in enumerate(timeline.stages):
        slots = SCHEDULES[schedule](stage, 3, 4, chunks)
        assert [(bar.work, bar.chunk, bar.micro) for bar in bars] == [(s.work, s.chunk, s.micro) for s in slots]


def test_measured_durations_simulate_to_what_was_measured() -> None:
    """Taking a simulation for a measurement gives the same timeline back."""
    plan = make_plan(layers=6, pp=3, accumulation=4, schedule=Schedule.ZB_H1, arch={"tie_embeddings": True})
    graph = build_graph(plan, streams=Streams.COMMUNICATOR)
    done = simulate(graph, flop_durations(plan))
    again = measured_timeline(plan, graph.programs, done.spans)
    assert again == planned_timeline(plan, flop_durations(plan))
    assert planned_timeline(plan, measured_durations(graph.programs, done.spans)).bubble == pytest.approx(again.bubble)
    assert again.bubble == pytest.approx(done.bubble)
