"""A step's duration without its graph is the longest path through it, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from meshwright.plan.action import Action, Op
from meshwright.plan.folds.duration import step_seconds
from meshwright.plan.folds.graph import Streams, build_graph
from meshwright.plan.folds.simulate import simulate
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program
from tests.unit.plan.plans import make_plan
from tests.unit.plan.programs import all_programs, plans


def uneven(program: Program, action: Action) -> float:
    """Seconds that no two kinds of actions share, and that add up to other bits in another order."""
    if action.op is Op.SEND or action.op is Op.RECEIVE:
        return 0.37
    kind = list(Op).index(action.op)
    return (0.1 + 0.013 * kind) * (1.7 if action.unit % 3 == 1 else 1.1) + 0.003 * program.stage * (kind < 6)


@settings(max_examples=80, deadline=None)
@given(plans())
def test_it_is_the_longest_path(plan: Plan) -> None:
    assert step_seconds(plan, uneven) == simulate(build_graph(plan, streams=Streams.COMMUNICATOR), uneven).step_seconds


@settings(max_examples=15, deadline=None)
@given(plans(max_pp=3))
def test_it_is_over_all_ranks_too(plan: Plan) -> None:
    programs = all_programs(plan)
    graph = build_graph(plan, programs, Streams.COMMUNICATOR)
    assert step_seconds(plan, uneven, programs) == simulate(graph, uneven).step_seconds


def test_a_step_that_hangs_has_none() -> None:
    plan = make_plan(dp=2)
    programs = all_programs(plan)
    programs[1] = replace(programs[1], actions=programs[1].actions[2:3])
    with pytest.raises(ValueError, match="hangs"):
        step_seconds(plan, uneven, programs)
