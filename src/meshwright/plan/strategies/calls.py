"""What all strategies together send inside a unit: the one list that the ledger adds up."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.plan.action import COMPUTE, Action, Kind
from meshwright.plan.plan import Plan
from meshwright.plan.strategies import context, expert, tensor
from meshwright.plan.strategies.call import Call
from meshwright.plan.strategies.expert import Exchange


def unit_calls(plan: Plan, action: Action, kind: Kind = Kind.TRAIN, exchange: Exchange | None = None) -> Iterator[Call]:
    """The collectives inside a compute action; none inside any other. `exchange`: the rows of its experts."""
    if action.op in COMPUTE:
        yield from tensor.calls(plan, action)
        yield from context.calls(plan, action)
        yield from expert.calls(plan, action, kind, exchange)
