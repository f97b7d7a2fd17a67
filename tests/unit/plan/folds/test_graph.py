"""The wait-for graph: every generated step can finish; what cannot is told in words; its longest path is the time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from meshwright.arch.arch import Experts
from meshwright.config.choices import Schedule
from meshwright.layout.groups import GroupName
from meshwright.plan.action import Action, Kind, Op, What
from meshwright.plan.folds.deadlock import first_unreached, order, problems
from meshwright.plan.folds.graph import Streams, build_graph, representatives
from meshwright.plan.folds.hang import hang_report
from meshwright.plan.folds.simulate import Durations, simulate
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program, program
from tests.unit.plan.plans import make_plan
from tests.unit.plan.programs import all_programs, find, moved, plans, swapped, without


@settings(max_examples=120, deadline=None)
@given(plans())
def test_every_generated_step_can_finish(plan: Plan) -> None:
    for kind in Kind:
        graph = build_graph(plan, representatives(plan, kind))
        assert problems(plan, graph) == ()
        assert first_unreached(graph) == {}


@settings(max_examples=20, deadline=None)
@given(plans(max_pp=3))
def test_roles_say_what_all_ranks_say(plan: Plan) -> None:
    assert problems(plan, build_graph(plan, all_programs(plan))) == ()


def test_the_order_respects_every_edge() -> None:
    graph = build_graph(make_plan(layers=4, pp=2, dp=2, zero=3, accumulation=3))
    place = {node: index for index, node in enumerate(order(graph))}
    assert len(place) == len(graph.after)
    assert all(place[each] < place[node] for node, before in enumerate(graph.after) for each in before)


def test_two_gathers_swapped_on_one_rank_are_a_mismatch() -> None:
    plan = make_plan(layers=3, dp=2, zero=3)
    programs = all_programs(plan)
    gathers = [i for i, action in enumerate(programs[1].actions) if action.op is Op.GATHER]
    programs[1] = swapped(programs[1], gathers[1], gathers[2])
    first, *_ = problems(plan, build_graph(plan, programs))
    assert "rank 0 means all_gather of gather (layers.0" in first
    assert "rank 1 all_gather of gather (layers.1" in first


def test_a_late_send_hangs_and_is_told() -> None:
    """Stage 0 sends only after it has waited for the cotangent of what it did not send."""
    plan = make_plan(pp=2)
    programs = representatives(plan)
    send = find(programs[0], lambda a: a.op is Op.SEND)
    cotangent = find(programs[0], lambda a: a.op is Op.WAIT and a.what is What.COTANGENT)
    programs[0] = moved(programs[0], send, cotangent)
    graph = build_graph(plan, programs)
    (text,) = problems(plan, graph)
    assert text.startswith("the step hangs: ")
    for words in ("send of the activation of micro-batch 0", "cotangent of micro-batch 0", "rank 0", "rank 1"):
        assert words in text
    assert set(first_unreached(graph)) == {0, 1}


def test_a_collective_that_one_rank_skips_hangs() -> None:
    plan = make_plan(dp=2, zero=1)
    programs = all_programs(plan)
    norm = find(programs[1], lambda a: a.op is Op.NORM)
    programs[1] = without(without(programs[1], norm + 1), norm)
    mismatch, *_, text = problems(plan, build_graph(plan, programs))
    assert mismatch.startswith("rank 0 means all_reduce of norm () with 32 bytes by action")
    assert "rank 1 all_gather of publish" in mismatch
    assert "which not all of its ranks launch" in text


def test_two_groups_entered_in_different_orders_may_hang() -> None:
    """Each group's own order is right, so only a graph over all groups together sees it."""
    plan = make_plan(dp=4, pp=2, zero=1, within=2, arch={"tie_embeddings": True})
    programs = representatives(plan)
    sums = [i for i, a in enumerate(programs[0].actions) if a.op is Op.SUM and a.what is What.LOSS]
    assert [programs[0].actions[i].group for i in sums] == ["tokens", "pp"]
    norm = find(programs[0], lambda a: a.op is Op.NORM)
    # launched before the loss sum over the stages, waited for where it was
    programs[0] = moved(programs[0], norm, sums[1])
    assert any("the step hangs" in text for text in problems(plan, build_graph(plan, programs)))
    assert problems(plan, build_graph(plan, programs, Streams.COMMUNICATOR)) == ()


@pytest.mark.parametrize("axis", [{"tp": 2}, {"cp": 2}, {"ep": 2, "arch": {"experts": Experts(4, 2, 8)}}])
def test_a_unit_that_meets_others_behind_a_sum_of_both_stages_may_hang(axis: dict[str, Any]) -> None:
    """The tied sum, launched once the head's backward is done: the blocks before it would wait for the other stage,
    which waits for their cotangent."""
    arch = {"tie_embeddings": True, **axis.pop("arch", {})}
    plan = make_plan(layers=4, pp=2, arch=arch, **axis)
    programs, tied = representatives(plan), {0, plan.arch.head_unit}
    for rank, own in programs.items():
        launch = find(own, lambda a: a.op is Op.SUM and a.group is GroupName.TIED)
        last = max(index for index, a in enumerate(own.actions) if a.op is Op.BACKWARD and a.unit in tied)
        programs[rank] = moved(own, launch, last + 1)
    assert any("the step hangs" in text for text in problems(plan, build_graph(plan, programs)))
    assert problems(plan, build_graph(plan, programs, Streams.COMMUNICATOR)) == ()
    assert problems(plan, build_graph(plan)) == ()


def unit_times(layers: int, forward: float = 1.0, backward: float = 2.0, message: float = 0.0) -> Durations:
    def seconds(_: Program, action: Action) -> float:
        if action.op is Op.SEND:
            return message
        block = 0 < action.unit <= layers
        return {Op.FORWARD: forward, Op.BACKWARD: backward}.get(action.op, 0.0) if block else 0.0

    return seconds


@pytest.mark.parametrize(
    ("schedule", "step", "bubble"),
    [(Schedule.NAIVE, 192, 3 / 4), (Schedule.GPIPE, 66, 3 / 11), (Schedule.ONE_F_ONE_B, 66, 3 / 11)],
)
def test_the_textbook_bubbles(schedule: Schedule, step: float, bubble: float) -> None:
    """Four stages of two blocks, eight micro-batches, borders and head free: (p - 1) / p and (p - 1) / (m + p - 1)."""
    plan = make_plan(layers=8, pp=4, accumulation=8, schedule=schedule)
    result = simulate(build_graph(plan, streams=Streams.COMMUNICATOR), unit_times(8))
    assert result.step_seconds == step
    assert result.bubble == pytest.approx(bubble)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micros", [1, 2, 5, 16])
def test_the_bubble_formulas_hold_everywhere(stages: int, micros: int) -> None:
    for schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B):
        plan = make_plan(layers=stages, pp=stages, accumulation=micros, schedule=schedule)
        result = simulate(build_graph(plan, streams=Streams.COMMUNICATOR), unit_times(stages))
        assert result.bubble == pytest.approx((stages - 1) / (micros + stages - 1))


def test_what_follows_the_last_compute_is_no_bubble() -> None:
    """An update of 10 s lengthens the step, not the pipeline."""
    plan = make_plan(layers=4, pp=4, accumulation=8, schedule=Schedule.ONE_F_ONE_B)
    graph, computes = build_graph(plan, streams=Streams.COMMUNICATOR), unit_times(4)
    with_update = simulate(graph, lambda program, action: 10.0 if action.op is Op.UPDATE else computes(program, action))
    alone = simulate(graph, computes)
    assert with_update.step_seconds >= alone.step_seconds + 10.0
    assert with_update.compute_seconds == alone.compute_seconds
    assert with_update.bubble == alone.bubble == pytest.approx(3 / 11)


def test_a_transfer_hides_behind_computation_or_is_exposed_in_its_wait() -> None:
    """Gathers of 1 s behind forwards of 1 s: only the first is seen."""
    plan = make_plan(layers=4, dp=2, zero=3)
    graph = build_graph(plan, streams=Streams.COMMUNICATOR)

    def seconds(_: Program, action: Action) -> float:
        return 1.0 if action.op in (Op.GATHER, Op.FORWARD, Op.BACKWARD) else 0.0

    spans = simulate(graph, seconds).spans[0]
    actions = graph.programs[0].actions
    exposed = [spans[i].end - spans[i].start for i, a in enumerate(actions) if a.op is Op.WAIT and a.bucket >= 0]
    assert sum(exposed) == 1.0
    assert exposed[0] == 1.0


def test_links_take_time_in_both_directions() -> None:
    plan = make_plan(pp=2)
    result = simulate(build_graph(plan, streams=Streams.COMMUNICATOR), unit_times(2, message=10.0))
    assert result.step_seconds == 6 + 2 * 10


def test_a_step_that_hangs_has_no_duration() -> None:
    plan = make_plan(dp=2)
    programs = all_programs(plan)
    programs[1] = replace(programs[1], actions=programs[1].actions[2:3])
    with pytest.raises(ValueError, match="hangs"):
        simulate(build_graph(plan, programs), unit_times(2))


def test_a_hang_names_the_rank_that_does_not_come() -> None:
    plan = make_plan(layers=3, dp=2, pp=2, accumulation=8)
    steps = program(plan, 1, Kind.TRAIN)
    launch = find(steps, lambda a: a.op is Op.SUM and a.what is What.GRADIENT)
    bucket = steps.actions[launch].bucket
    waiting = find(steps, lambda a: a.op is Op.WAIT and a.of == launch)
    late = find(steps, lambda a: a.op is Op.FORWARD and a.micro == 6)
    report = hang_report(plan, {0: waiting, 1: late})
    assert report.suspects == (1,)
    first, second = report.lines
    assert first == f"rank 0 waits in action {waiting}, sum of bucket {bucket}, layer 1 (rank 1 has not launched it)"
    assert second == f"rank 1 is at {late}, forward of micro-batch 6, embedding"


def test_a_hang_follows_waits_to_their_cause() -> None:
    """Stage 1 waits for stage 0, whose other rank stands in a computation."""
    plan = make_plan(dp=2, pp=2, zero=3)
    first, last = program(plan, 0), program(plan, 2)
    gather = find(first, lambda a: a.op is Op.WAIT and first.actions[a.of].op is Op.GATHER)
    receive = find(last, lambda a: a.op is Op.WAIT and a.what is What.ACTIVATION)
    report = hang_report(plan, {0: gather, 1: 0, 2: receive, 3: receive})
    assert report.suspects == (1,)
    assert report.lines[-1] == "rank 1 is at 0, count of trained tokens"
