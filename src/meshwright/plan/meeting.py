"""The groups of a plan's mesh: who meets whom depends on the degrees, hybrid sharding, the model's heads and
the kind of context parallelism."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.layout.groups import Group, GroupName, groups
from meshwright.plan.plan import Plan
from meshwright.plan.strategies.context import ulysses_ways
from meshwright.plan.strategies.tensor import kv_copies


def plan_groups(plan: Plan) -> Mapping[GroupName, Group]:
    """Every group of the mesh that `plan` runs on, in the order in which communicators are made."""
    copies, inner = kv_copies(plan.degrees, plan.arch), ulysses_ways(plan.degrees.cp, plan.context)
    return groups(plan.degrees, plan.sharding.within, copies, inner)


def counts_together(plan: Plan, name: GroupName) -> bool:
    """Whether all ranks of a group take part in the count that opens a step: none goes on before all have begun it.

    The count is one of samples, so ranks of a context axis do not meet in it.
    """
    at = plan.degrees.coordinates(0)
    members = {each: set(plan_groups(plan)[each].members(plan.degrees, at)) for each in (name, GroupName.BATCH)}
    return members[name] <= members[GroupName.BATCH]
