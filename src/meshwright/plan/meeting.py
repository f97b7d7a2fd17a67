"""The groups of a plan's mesh: who meets whom depends on the degrees, hybrid sharding and the model's heads."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.layout.groups import Group, GroupName, groups
from meshwright.plan.plan import Plan
from meshwright.plan.strategies.tensor import kv_copies


def plan_groups(plan: Plan) -> Mapping[GroupName, Group]:
    """Every group of the mesh that `plan` runs on, in the order in which communicators are made."""
    return groups(plan.degrees, plan.sharding.within, kv_copies(plan.degrees, plan.arch))
