"""What ranks really did beside what was planned: the same actions in the same order, and failures say where."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

from meshwright.config.choices import Recompute, Schedule
from meshwright.launch.join import join_file, leave
from meshwright.parallel.recorder import recorded
from meshwright.plan.action import Action, Op
from meshwright.plan.folds.simulate import Span
from meshwright.plan.folds.timeline import (
    Timeline,
    flop_durations,
    measured_durations,
    measured_timeline,
    planned_timeline,
)
from meshwright.plan.program import program
from meshwright.plan.schedules import Work
from meshwright.plan.stages import virtual_of
from meshwright.testing.ranks import RanksError, run, run_cases
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.pipelines import Pipelined, pipeline_of

CHUNKS = {Schedule.INTERLEAVED: 2, Schedule.ZB_V: 2}


def spans_of_a_step(rank: int, case: Pipelined) -> tuple[Span, ...]:
    plan = case.plan
    engine = pipeline_of(plan)
    seen: list[Action] = []
    batches = global_batches(plan, 3)
    engine.observe(seen.append)
    engine.step(local_share(plan, batches[0], rank), 0.1)
    assert tuple(seen) == program(plan, rank).actions
    engine.step(local_share(plan, batches[1], rank), 0.1)
    _, spans = recorded(engine, lambda: engine.step(local_share(plan, batches[2], rank), 0.1))
    return spans


def words(timeline: Timeline) -> list[list[tuple[Work, int, int]]]:
    return [[(bar.work, bar.chunk, bar.micro) for bar in bars] for bars in timeline.stages]


def test_measured_actions_are_the_planned_ones_in_order() -> None:
    cases = [
        Pipelined(schedule, 3, 5, CHUNKS.get(schedule, 1), recompute=recompute)
        for schedule in Schedule
        for recompute in (Recompute.NONE, Recompute.FULL)
    ]
    results = run_cases(spans_of_a_step, 3, cases)
    for number, case in enumerate(cases):
        plan = case.plan
        spans = {rank: results[rank][number] for rank in range(3)}
        programs = {rank: program(plan, rank) for rank in range(3)}
        measured = measured_timeline(plan, programs, spans)
        assert words(measured) == words(planned_timeline(plan, flop_durations(plan))), case.name
        check_causality(case, measured)
        assert 0.0 < measured.bubble < 1.0
        assert 0.0 < planned_timeline(plan, measured_durations(programs, spans)).bubble < 1.0


def check_causality(case: Pipelined, measured: Timeline) -> None:
    """On one clock: no slot ends before what it waits for on another stage has begun to be there."""
    plan = case.plan
    ended = {
        (bar.work, virtual_of(plan, stage, bar.chunk), bar.micro): bar
        for stage, bars in enumerate(measured.stages)
        for bar in bars
    }
    for (work, virtual, micro), bar in ended.items():
        before = {Work.FORWARD: virtual - 1, Work.BACKWARD: virtual + 1}.get(work, -1)
        earlier = ended.get((work, before, micro))
        assert earlier is None or earlier.end <= bar.end, (case.name, work, virtual, micro)
        if earlier is not None and case.recompute is Recompute.NONE:
            assert earlier.end <= bar.start, (case.name, work, virtual, micro)


def fails_in_the_middle(rank: int) -> None:
    """Rank 1 of three stages breaks in a forward; the others wait for what it never sends."""
    plan = Pipelined(pp=3, micros=4, layers=3).plan
    engine = pipeline_of(plan)

    def break_down(action: Action) -> None:
        if rank == 1 and action.op is Op.FORWARD and action.micro == 2:
            raise RuntimeError("the device is on fire")

    engine.observe(break_down)
    (batch,) = global_batches(plan, 1)
    engine.step(local_share(plan, batch, rank), 0.1)


def test_a_failure_names_rank_stage_action_and_micro_batch() -> None:
    with pytest.raises(RanksError) as caught:
        run(fails_in_the_middle, 3, timeout=30)
    told = str(caught.value)
    assert "rank 1, stage 1 of 3, action" in told
    assert "of the step: forward of micro-batch 2, layer 1" in told
    (neighbour,) = (line for line in told.splitlines() if line.startswith("rank 0, stage 0 of 3, action"))
    assert neighbour.endswith(("to stage 1", "from stage 1")), told


STALL_S = 15.0
"""What the ranks agree on as the longest wait."""


def stands_still(rank: int, meeting: str) -> None:
    """Rank 1 stops in a backward and says nothing; rank 0 gives up after the time that the ranks agreed on."""
    leave()
    join_file(Path(meeting), rank, 2, timeout_s=STALL_S)
    plan = Pipelined(pp=2, micros=3, layers=2).plan
    engine = pipeline_of(plan)

    def stall(action: Action) -> None:
        if rank == 1 and action.op is Op.BACKWARD and action.micro == 1:
            threading.Event().wait(600)

    first, second = global_batches(plan, 2)
    engine.step(local_share(plan, first, rank), 0.1)  # what happens once, and slowly on a busy machine, is over
    engine.observe(stall)
    begin = time.monotonic()
    try:
        engine.step(local_share(plan, second, rank), 0.1)
    except RuntimeError as error:
        error.add_note(f"gave up after {time.monotonic() - begin:.1f} s")
        raise


@pytest.mark.prove
def test_a_stall_ends_and_is_named(tmp_path: Path) -> None:
    """B37 (NVIDIA/Megatron-LM#5100). Groups made by torch for themselves wait half an hour, whatever was agreed on."""
    with pytest.raises(RanksError) as caught:
        run(stands_still, 2, str(tmp_path / "meeting"), timeout=240)
    told = str(caught.value)
    (waited,) = re.findall(r"gave up after ([\d.]+) s", told)  # from its step on, not from the import of torch
    assert STALL_S <= float(waited) < 60
    assert "rank 0, stage 0 of 2, action" in told
    assert "of the step: wait for the receive of the cotangent of micro-batch 1 from stage 1" in told
    assert "in stall" in told  # where rank 1 stood
