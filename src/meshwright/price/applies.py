"""Where the closed forms of a step's time hold for the literal program; elsewhere the program itself is simulated.

They are within 1 % of the simulation (`tests/unit/price/test_agreement.py`) but for

    schedules   that mix the passes of several chunks, or put off weight work: forms are those of papers, in which every
                stage costs the same
    traffic     that takes about as long as the computation that it hides behind: how much of it shows then depends on
                where each pipeline slot begins

Trainers of other kinds (`software.following = "usual"`) have no program here: their figure is always the closed form.
"""

from __future__ import annotations

from meshwright.config.choices import Schedule
from meshwright.layout.axes import Axis
from meshwright.plan.plan import Plan
from meshwright.price.compute import straggling, units
from meshwright.price.layouts import of_plan
from meshwright.price.replicas import replicas
from meshwright.price.target import Target
from meshwright.price.times import block_seconds, busy_behind
from meshwright.price.weights import weights

__all__ = ["beyond_closed_form"]

_EXACT = (Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.NAIVE)
_HIDDEN = 0.8  # of the computation beside it: traffic below it shows nowhere but where the forms say so


def beyond_closed_form(plan: Plan, target: Target) -> str | None:
    """Why the closed form of the literal program's time is not exact for `plan`; None where it is."""
    if _shared(plan, target):  # a simulation would give every stage processors of its own
        return None
    if plan.degrees.pp > 1 and plan.pipeline.schedule not in _EXACT:
        return f"{plan.pipeline.schedule.value} has no exact closed form"
    if _competes(plan, target):
        return "exchanges between replicas take about as long as the computation beside them"
    return None


def _shared(plan: Plan, target: Target) -> bool:
    """Whether stages of one node compute on the same processors (`sharing.py`)."""
    node = target.cluster.node
    near = float(of_plan(plan).stride(Axis.PP)[0]) < node.devices
    return plan.degrees.pp > 1 and node.gain_alone > 1 and near


def _competes(plan: Plan, target: Target) -> bool:
    layouts = of_plan(plan)
    own = units(target, layouts).slowed(1 + straggling(target, layouts))
    replica = replicas(target, layouts, weights(target, layouts))
    block = block_seconds(target, layouts, own, replica)
    ahead, behind = float(block.front[0]), float(busy_behind(layouts, block)[0])
    many = plan.degrees.pp > 1
    often = many and (replica.forward[0] > _HIDDEN * ahead or replica.backward[0] > _HIDDEN * behind)
    return bool(often or replica.block.sum[0] > _HIDDEN * behind)
