"""The step program: what one rank does in a step, as a literal list of actions.

    schedule    slots -> computes, one a (unit, micro-batch)                      schedules/
    borders     receives posted one slot ahead, sends after their slot            lowering/borders.py
    parameters  gather before use, prefetch the next, release after (ZeRO-3)      lowering/parameters.py
    gradients   sum a bucket after its last writer                                lowering/gradients.py
    tail        what closes a step: waits, norm, update, publish                  lowering/tail.py

The four rules know nothing of each other: each looks only at the list of computes. The program is a cached pure
function, equal for all ranks of one role; the executor runs it literally, and every prediction is a fold over it.

    a step at ZeRO-0 on two ranks, one micro-batch, a model of two blocks

    count  F emb  F 1  F 2  F head  B head  sum head  B 2  sum 2  B 1  sum 1  B emb  sum emb  waits  norm  updates
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.plan.action import Action, Kind
from meshwright.plan.buckets import Bucket, stage_buckets
from meshwright.plan.lowering.borders import Borders
from meshwright.plan.lowering.computes import Slotted, computes
from meshwright.plan.lowering.gradients import Gradients
from meshwright.plan.lowering.listing import Listing
from meshwright.plan.lowering.parameters import Parameters
from meshwright.plan.lowering.tail import close_step, count_tokens
from meshwright.plan.plan import Plan
from meshwright.plan.schedules import SCHEDULES, ScheduleFunction


@dataclass(frozen=True, slots=True)
class Program:
    """The actions of one role, and the buckets their indices mean."""

    stage: int
    kind: Kind
    actions: tuple[Action, ...]
    buckets: tuple[Bucket, ...]


def program(plan: Plan, rank: int, kind: Kind = Kind.TRAIN, schedule: ScheduleFunction | None = None) -> Program:
    """What `rank` does in one step of `kind`; `schedule` replaces the plan's own."""
    return role_program(plan, plan.degrees.coordinates(rank).pp, kind, schedule)


def role_program(plan: Plan, stage: int, kind: Kind, schedule: ScheduleFunction | None = None) -> Program:
    """The program of the ranks on one pipeline coordinate: ranks of one role run equal programs."""
    return _lower(plan, stage, kind, schedule or SCHEDULES[plan.pipeline.schedule])


@lru_cache(maxsize=256)
def _lower(plan: Plan, stage: int, kind: Kind, schedule: ScheduleFunction) -> Program:
    slots = computes(plan, stage, kind, schedule)
    out = Listing()
    borders, parameters, gradients = (
        Borders(plan, stage, lambda other: computes(plan, other, kind, schedule)),
        Parameters(plan, stage, slots),
        Gradients(plan, stage, slots),
    )
    count_tokens(plan, out)
    for slot in slots:
        borders.before(out, slot)
        _run(out, slot, borders, parameters, gradients)
        borders.after(out, slot)
    borders.finish(out)
    close_step(plan, stage, kind, out)
    return Program(stage, kind, tuple(out.actions), stage_buckets(plan, stage))


def _run(out: Listing, slot: Slotted, borders: Borders, parameters: Parameters, gradients: Gradients) -> None:
    for compute in slot.computes:
        parameters.before(out, compute)
        gradients.before(out, compute)
        borders.needed(out, slot, compute)
        out.add(compute.action)
        parameters.after(out, compute)
        gradients.after(out, compute)
