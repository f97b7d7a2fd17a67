"""Every generated program is free of hazards; every mutation that breaks one is found and named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from meshwright.config.choices import Recompute, Schedule
from meshwright.layout.groups import GroupName
from meshwright.plan.action import COMPUTE, LAUNCHES, Kind, Op, What
from meshwright.plan.folds.hazards import hazards
from meshwright.plan.meeting import counts_together
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program, role_program
from tests.unit.plan.plans import make_plan
from tests.unit.plan.programs import find, moved, plans, swapped, without


@settings(max_examples=150, deadline=None)
@given(plans())
def test_no_generated_program_has_a_hazard(plan: Plan) -> None:
    for kind in Kind:
        for stage in range(plan.degrees.pp):
            assert hazards(plan, role_program(plan, stage, kind)) == ()


@settings(max_examples=50, deadline=None)
@given(plans())
def test_shards_are_read_between_the_count_and_the_norm(plan: Plan) -> None:
    """Ranks that share memory wait for each other nowhere else: the count tells that all have written, the norm (in an
    evaluation the sum of the loss) that all have read."""
    for kind in Kind:
        for stage in range(plan.degrees.pp):
            actions = role_program(plan, stage, kind).actions
            counted, *_ = (i for i, action in enumerate(actions) if action.op is Op.COUNT)
            reads = [i for i, a in enumerate(actions) if a.op is Op.WAIT and actions[a.of].op is Op.GATHER]
            closing = [i for i, a in enumerate(actions) if a.op is Op.NORM or (a.op is Op.SUM and a.what is What.LOSS)]
            closed = closing[-1] if kind is Kind.TRAIN else closing[0] if closing else len(actions)
            written = [i for i, action in enumerate(actions) if action.op is Op.UPDATE]
            assert actions[counted + 1].of == counted or plan.degrees.dp == 1
            assert all(counted < read < closed for read in reads)
            assert all(closed < update for update in written)


def test_context_ranks_do_not_count_together() -> None:
    assert counts_together(make_plan(dp=2, pp=2), GroupName.DENSE)
    assert counts_together(make_plan(dp=4, zero=3, within=2), GroupName.SHARD)
    assert not counts_together(make_plan(dp=2, cp=2), GroupName.DENSE)


def first_hazard(plan: Plan, program: Program) -> str:
    found = hazards(plan, program)
    assert found
    return str(found[0])


@pytest.fixture
def zero3() -> tuple[Plan, Program]:
    plan = make_plan(layers=3, dp=2, zero=3, accumulation=2)
    return plan, role_program(plan, 0, Kind.TRAIN)


def test_a_dropped_wait_is_found(zero3: tuple[Plan, Program]) -> None:
    plan, program = zero3
    for index in (i for i, action in enumerate(program.actions) if action.op is Op.WAIT):
        assert hazards(plan, without(program, index)), program.actions[index]


def test_a_wait_for_nothing_is_found(zero3: tuple[Plan, Program]) -> None:
    plan, program = zero3
    launch = find(program, lambda action: action.op is Op.GATHER)
    broken = without(program, launch)
    assert "which is not under way" in first_hazard(plan, broken)


def test_every_action_is_missed_when_it_is_left_out(zero3: tuple[Plan, Program]) -> None:
    plan, program = zero3
    for index in range(len(program.actions)):
        assert hazards(plan, without(program, index)), (index, program.actions[index])


def test_a_bucket_that_travels_must_not_be_written() -> None:
    """A tied bucket on one stage, ZeRO-2: unless the head waits, gradients are silently wrong."""
    plan = make_plan(dp=2, zero=2, accumulation=2, arch={"tie_embeddings": True})
    program = role_program(plan, 0, Kind.TRAIN)
    (tied,) = (bucket.index for bucket in program.buckets if bucket.tied)
    launch = find(program, lambda a: a.op is Op.SUM and a.bucket == tied)
    wait = find(program, lambda a: a.op is Op.WAIT and a.of == launch)
    head = find(program, lambda a: a.op is Op.BACKWARD and a.unit == plan.arch.head_unit and a.micro == 1)
    assert launch < wait < head
    text = first_hazard(plan, moved(program, wait, head + 1))
    assert f"touches the gradient of bucket {tied} while sum ({launch}) is under way" in text


def test_parameters_are_not_read_before_they_are_gathered(zero3: tuple[Plan, Program]) -> None:
    plan, program = zero3
    wait = find(program, lambda a: a.op is Op.WAIT and program.actions[a.of].op is Op.GATHER)
    following = next(i for i in range(wait, len(program.actions)) if program.actions[i].op in COMPUTE)
    assert "while gather" in first_hazard(plan, moved(program, wait, following + 1))


def test_parameters_are_released_once(zero3: tuple[Plan, Program]) -> None:
    plan, program = zero3
    release = find(program, lambda a: a.op is Op.RELEASE)
    twice = Program(0, Kind.TRAIN, (*program.actions, program.actions[release]), program.buckets)
    assert "needs the parameters of bucket 0, which is not there" in first_hazard(plan, twice)
    assert "comes too late, or twice" in first_hazard(plan, without(program, release))


def test_a_value_is_not_sent_before_it_is_computed() -> None:
    plan = make_plan(pp=2)
    program = role_program(plan, 0, Kind.TRAIN)
    send = find(program, lambda a: a.op is Op.SEND)
    assert "needs the value that enters unit 2, micro-batch 0" in first_hazard(plan, moved(program, send, send - 1))


def test_a_received_value_is_waited_for() -> None:
    plan = make_plan(pp=2)
    program = role_program(plan, 1, Kind.TRAIN)
    wait = find(program, lambda a: a.op is Op.WAIT and a.what is What.ACTIVATION)
    assert "while receive" in first_hazard(plan, moved(program, wait, wait + 1))


def test_a_sum_must_follow_the_last_writer() -> None:
    plan = make_plan(dp=2, accumulation=2)
    program = role_program(plan, 0, Kind.TRAIN)
    launch = find(program, lambda a: a.op is Op.SUM and a.what is What.GRADIENT)
    assert program.actions[launch - 1].op is Op.BACKWARD
    assert hazards(plan, swapped(program, launch - 1, launch))


def test_an_update_needs_all_sums_of_its_bucket() -> None:
    """Hybrid sharding and tying: a sum over copies that is left out leaves copies that differ."""
    plan = make_plan(dp=4, pp=2, zero=1, within=2, arch={"tie_embeddings": True})
    program = role_program(plan, 0, Kind.TRAIN)
    for group in ("shard", "copy", "tied"):
        launch = find(program, lambda a, group=group: a.op is Op.SUM and a.group == group)
        wait = find(program, lambda a, launch=launch: a.op is Op.WAIT and a.of == launch)
        text = " ".join(map(str, hazards(plan, without(without(program, wait), launch))))
        assert f"needs the sum over {group} of bucket" in text


def test_a_recomputed_forward_keeps_its_input() -> None:
    plan = make_plan(recompute=Recompute.FULL)
    program = role_program(plan, 0, Kind.TRAIN)
    again = find(program, lambda a: a.op is Op.RECOMPUTE)
    assert "needs the graph of unit" in first_hazard(plan, without(program, again))


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
def test_every_launch_has_exactly_one_wait(schedule: Schedule) -> None:
    plan = make_plan(layers=4, pp=2, dp=2, zero=2, accumulation=4, schedule=schedule)
    for stage in range(2):
        actions = role_program(plan, stage, Kind.TRAIN).actions
        launched = [index for index, action in enumerate(actions) if action.op in LAUNCHES and action.group]
        assert sorted(action.of for action in actions if action.op is Op.WAIT) == launched
