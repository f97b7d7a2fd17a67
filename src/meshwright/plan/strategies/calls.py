"""What all strategies together send inside a unit: the one list that the ledger adds up."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.plan.action import COMPUTE, Action
from meshwright.plan.plan import Plan
from meshwright.plan.strategies import context, tensor
from meshwright.plan.strategies.call import Call


def unit_calls(plan: Plan, action: Action) -> Iterator[Call]:
    """The collectives inside a compute action; none inside any other."""
    if action.op in COMPUTE:
        yield from tensor.calls(plan, action)
        yield from context.calls(plan, action)
