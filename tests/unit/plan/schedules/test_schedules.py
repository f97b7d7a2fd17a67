"""Every schedule: complete, free of deadlock and hazard, as fast as its paper says, with as much in flight."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.arch.tensors import UnitKind
from meshwright.config.choices import Recompute, Schedule
from meshwright.plan.action import Action, Kind, Op
from meshwright.plan.folds.deadlock import problems
from meshwright.plan.folds.graph import Streams, build_graph, representatives
from meshwright.plan.folds.hazards import hazards
from meshwright.plan.folds.simulate import Simulation, simulate
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program
from meshwright.plan.schedules import SCHEDULES, Slot, Work
from meshwright.plan.schedules.check import check_slots, most_in_flight
from tests.unit.plan.plans import make_plan
from tests.unit.plan.schedules.grid import grid

DRAWN = {
    Schedule.NAIVE: (2, 2, 1),
    Schedule.GPIPE: (2, 3, 1),
    Schedule.ONE_F_ONE_B: (2, 3, 1),
    Schedule.INTERLEAVED: (2, 4, 2),
    Schedule.ZB_H1: (3, 4, 1),
    Schedule.ZB_V: (2, 3, 2),
}


def chunks_of(schedule: Schedule, asked: int) -> int:
    """The number of chunks nearest to `asked` that the schedule takes."""
    return {Schedule.INTERLEAVED: max(asked, 2), Schedule.ZB_V: 2}.get(schedule, 1)


@pytest.mark.parametrize("schedule", Schedule)
def test_its_file_draws_it(schedule: Schedule) -> None:
    text = sys.modules[SCHEDULES[schedule].__module__].__doc__
    assert text is not None
    stages, micros, chunks = DRAWN[schedule]
    lines = [line.rstrip() for line in text.splitlines()]
    for line in grid(schedule, stages, micros, chunks):
        assert any(found == line or found.startswith(f"{line}  ") for found in lines), line


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(Schedule), st.integers(1, 8), st.integers(1, 16), st.integers(1, 4))
def test_every_part_once_and_no_more_in_flight_than_said(
    schedule: Schedule, stages: int, micros: int, asked: int
) -> None:
    chunks = chunks_of(schedule, asked)
    for stage in range(stages):
        slots = SCHEDULES[schedule](stage, stages, micros, chunks)
        check_slots(slots, micros, chunks)
        bound = {
            Schedule.NAIVE: 1,
            Schedule.GPIPE: micros,
            Schedule.ONE_F_ONE_B: min(micros, stages - stage),
            Schedule.INTERLEAVED: min(micros * chunks, 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1),
            Schedule.ZB_H1: min(micros, stages),
            Schedule.ZB_V: min(2 * micros, 2 * stages),
        }[schedule]
        found = most_in_flight(slots)
        assert found <= bound
        if schedule in (Schedule.NAIVE, Schedule.GPIPE, Schedule.ONE_F_ONE_B):
            assert found == bound


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(Schedule), st.integers(1, 8), st.integers(1, 16), st.integers(1, 4), st.data())
def test_every_program_is_accepted(
    schedule: Schedule, stages: int, micros: int, asked: int, data: st.DataObject
) -> None:
    """Layers 1 to 40 on stages 1 to 8, chunks 1 to 4, 1 to 16 micro-batches, with all that a program adds to slots."""
    chunks = chunks_of(schedule, asked)
    dp = data.draw(st.sampled_from((1, 2)))
    plan = make_plan(
        layers=data.draw(st.integers(stages * chunks, 40)),
        pp=stages,
        chunks=chunks,
        schedule=schedule,
        accumulation=micros,
        dp=dp,
        zero=data.draw(st.integers(0, 3)) if dp > 1 else 0,
        recompute=data.draw(st.sampled_from((Recompute.NONE, Recompute.FULL))),
        arch={"tie_embeddings": data.draw(st.booleans())},
    )
    for kind in Kind:
        programs = representatives(plan, kind)
        for streams in Streams:
            assert problems(plan, build_graph(plan, programs, streams)) == ()
        for program in programs.values():
            assert hazards(plan, program) == ()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(Schedule), st.integers(1, 8), st.integers(1, 16), st.integers(1, 4))
def test_bubbles_are_those_of_the_papers(schedule: Schedule, p: int, m: int, asked: int) -> None:
    v = chunks_of(schedule, asked)
    expected = {
        Schedule.NAIVE: (p - 1) / p,
        Schedule.GPIPE: (p - 1) / (m + p - 1),
        Schedule.ONE_F_ONE_B: (p - 1) / (m + p - 1),
        Schedule.INTERLEAVED: (p - 1) / (v * m + p - 1) if m % p == 0 else None,
        Schedule.ZB_H1: (p - 1) / (3 * m + p - 1) if m >= p else None,
        Schedule.ZB_V: (p - 1) / (6 * m + p - 1) if m >= 2 * p - 1 else None,
    }[schedule]
    done = simulated(make_plan(layers=p * v, pp=p, chunks=v, schedule=schedule, accumulation=m))
    if expected is not None:
        assert done.bubble == pytest.approx(expected, abs=1e-12)
    elif schedule is Schedule.INTERLEAVED:
        full = -(-m // p) * p
        assert done.step_seconds <= 3 * (full * v + p - 1) + 1e-9


def simulated(plan: Plan) -> Simulation:
    """Blocks take a second a part, transfers and everything else nothing."""

    def seconds(program: Program, action: Action) -> float:
        if action.unit < 0 or plan.arch.unit_kind(action.unit) is not UnitKind.BLOCK:
            return 0.0
        return {Op.FORWARD: 1.0, Op.BACKWARD: 1.0 if action.split else 2.0, Op.WEIGHT: 1.0}.get(action.op, 0.0)

    return simulate(build_graph(plan, streams=Streams.COMMUNICATOR), seconds)


def test_the_figures_of_four_stages_and_eight_micro_batches() -> None:
    """1F1B 0.273, interleaved 0.158, ZB-H1 0.111."""

    def bubble(schedule: Schedule, chunks: int = 1) -> float:
        plan = make_plan(layers=8, pp=4, chunks=chunks, schedule=schedule, accumulation=8)
        return round(simulated(plan).bubble, 3)

    assert bubble(Schedule.ONE_F_ONE_B) == 0.273
    assert bubble(Schedule.INTERLEAVED, 2) == 0.158
    assert bubble(Schedule.ZB_H1) == 0.111
    assert bubble(Schedule.ZB_V, 2) == round(3 / 51, 3)


def test_what_is_no_schedule_is_refused_in_words() -> None:
    good = SCHEDULES[Schedule.ZB_H1](0, 2, 2, 1)
    check_slots(good, 2, 1)
    for slots, words in (
        (good[1:], "F of micro-batch 0, chunk 0 stands 0 times"),
        ((*good, good[0]), "F of micro-batch 0, chunk 0 stands 2 times"),
        ((*good, Slot(Work.FORWARD, 1, 0)), "F of micro-batch 0, chunk 1 belongs to nothing"),
        (tuple(slot for slot in good if slot.work is not Work.WEIGHT), "W of micro-batch 1, chunk 0 stands 0 times"),
        (tuple(reversed(good)), "W of micro-batch 0, chunk 0 stands before B of micro-batch 0, chunk 0"),
    ):
        with pytest.raises(ValueError, match=words):
            check_slots(slots, 2, 1)
