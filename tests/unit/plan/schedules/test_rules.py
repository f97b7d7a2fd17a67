"""What a pipeline asks of a plan, and the words in which it is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config.choices import Schedule
from meshwright.config.errors import RequestError
from meshwright.config.load import load_run
from meshwright.plan.plan import Execution, Plan
from meshwright.plan.rules import check_plan
from tests.unit.plan.plans import make_plan


def sequence_off(plan: Plan, compile_units: bool = False) -> Plan:
    return replace(plan, execution=Execution(compile=compile_units))


@pytest.mark.parametrize(("schedule", "chunks"), [(Schedule.ZB_H1, 1), (Schedule.ZB_V, 2)])
def test_split_schedules_are_not_compiled(schedule: Schedule, chunks: int) -> None:
    plan = make_plan(layers=4, pp=2, chunks=chunks, schedule=schedule)
    check_plan(plan)
    with pytest.raises(RequestError, match=r'"zb-.*" with parallel.compile = true') as caught:
        check_plan(sequence_off(plan, compile_units=True))
    assert 'parallel.schedule = "1f1b"' in str(caught.value)
    check_plan(sequence_off(make_plan(layers=4, pp=2), compile_units=True))


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ((3, 2), "must hold each of the 4 blocks once"),
        ((4,), "pp x chunks = 2 x 1 = 2 numbers"),
        ((5, -1), "blocks once"),
    ],
)
def test_wrong_lists_of_stages_are_refused(stages: tuple[int, ...], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        check_plan(make_plan(layers=4, pp=2, stages=stages))
    assert 'parallel.stages = "balanced"' in str(caught.value)


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 1), ("zb-v", 3), ("1f1b", 2)])
def test_chunks_that_a_schedule_does_not_take_are_refused(schedule: str, chunks: int) -> None:
    with pytest.raises(RequestError, match="interleaved takes chunks of at least 2, zb-v exactly 2"):
        load_run(overrides=[f"parallel.schedule={schedule}", f"parallel.chunks={chunks}"])
