"""Strategies for plans, and small edits of programs that keep their waits meaningful."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from meshwright.arch.arch import Experts
from meshwright.config.choices import Recompute, Schedule
from meshwright.plan.action import Action, Kind
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program, role_program
from tests.unit.plan.plans import make_plan

INSIDE: tuple[dict[str, int], ...] = ({}, {"tp": 2}, {"cp": 2}, {"ep": 2}, {"ep": 2, "cp": 2})
"""Axes over which units meet other ranks."""

SCHEDULES = (Schedule.NAIVE, Schedule.GPIPE, Schedule.ONE_F_ONE_B)


@st.composite
def plans(draw: st.DrawFn, max_pp: int = 4) -> Plan:
    """Every mix of pipeline, sharding, tying, recomputation and accumulation that runs on small meshes."""
    pp = draw(st.integers(1, max_pp))
    dp = draw(st.sampled_from((1, 2, 4)))
    inside = draw(st.sampled_from(INSIDE))
    replicas = dp * inside.get("cp", 1) * inside.get("ep", 1)
    experts = {"experts": Experts(4, 2, 8, dense_layers=1)} if "ep" in inside else {}
    return make_plan(
        layers=draw(st.integers(pp, 6)),
        pp=pp,
        dp=dp,
        accumulation=draw(st.integers(1, 5)),
        zero=draw(st.integers(0, 3)) if replicas > 1 else 0,
        within=draw(st.sampled_from((0, 2))) if replicas > 2 else 0,
        reshard=draw(st.booleans()),
        bucket_bytes=draw(st.sampled_from((0, 40_000))),
        schedule=draw(st.sampled_from(SCHEDULES)),
        recompute=draw(st.sampled_from((Recompute.NONE, Recompute.FULL))),
        arch={"tie_embeddings": draw(st.booleans()), **experts},
        **inside,
    )


def all_programs(plan: Plan, kind: Kind = Kind.TRAIN) -> dict[int, Program]:
    """The program of every rank."""
    ranks = range(plan.degrees.ranks)
    return {rank: role_program(plan, plan.degrees.coordinates(rank).pp, kind) for rank in ranks}


def find(program: Program, wanted: Callable[[Action], bool], nth: int = 0) -> int:
    """The index of the nth action that is wanted."""
    return [index for index, action in enumerate(program.actions) if wanted(action)][nth]


def without(program: Program, index: int) -> Program:
    """`program` with one action less."""
    order = [each for each in range(len(program.actions)) if each != index]
    return reordered(program, order)


def moved(program: Program, index: int, to: int) -> Program:
    """`program` with one action at another place."""
    order = [each for each in range(len(program.actions)) if each != index]
    order.insert(to, index)
    return reordered(program, order)


def swapped(program: Program, first: int, second: int) -> Program:
    order = list(range(len(program.actions)))
    order[first], order[second] = order[second], order[first]
    return reordered(program, order)


def reordered(program: Program, order: list[int]) -> Program:
    """The actions in another order; a wait still names the launch it ended before."""
    place = {old: new for new, old in enumerate(order)}
    actions = (program.actions[old] for old in order)
    moved_waits = (replace(a, of=place.get(a.of, len(order))) if a.of >= 0 else a for a in actions)
    return replace(program, actions=tuple(moved_waits))
