"""The ledger: calls and bytes of one step on one rank, one row a (group, operation, phase).

The prediction is a sum over the program. What a run measured is the same sum over the transfers that it saw, so the
two are compared for equality.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.layout.groups import GroupName
from meshwright.plan.action import COMPUTE, Kind, Phase
from meshwright.plan.folds.traffic import Operation, Transfer, Transport, sent_bytes, transfers
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program, program
from meshwright.plan.strategies.expert import Routed, even_exchange


@dataclass(frozen=True, slots=True)
class Row:
    """Sums over the calls of one (group, operation, phase), in bytes; `ranks` is the size of the group.

    Calls over factors of an axis stand in the axis's row: each counts the bytes of its own group.
    """

    group: GroupName
    ranks: int
    operation: Operation
    phase: Phase
    calls: int
    payload_bytes: int
    sent_bytes: int
    wire_bytes: int


def ledger(
    plan: Plan,
    rank: int,
    kind: Kind = Kind.TRAIN,
    transport: Transport = Transport.DIRECT,
    routed: Routed | None = None,
) -> tuple[Row, ...]:
    """What `rank` sends in one step, without evaluation, checkpoint or first-step checks.

    `routed`: the rows that its experts' units exchanged, by unit and micro-batch; without it loads are even. Raises
    KeyError for a unit and micro-batch of the step that it lacks.
    """
    steps = program(plan, rank, kind)
    return tally(_all_transfers(plan, rank, steps, routed), transport)


def _all_transfers(plan: Plan, rank: int, steps: Program, routed: Routed | None) -> Iterator[Transfer]:
    """Where no experts are on other ranks there is no exchange, and none is looked up."""
    even = even_exchange(plan, plan.degrees.coordinates(rank).ep) if plan.degrees.ep > 1 else None
    observed = routed is not None and even is not None
    for action in steps.actions:
        exchange = even
        if observed and action.op in COMPUTE and plan.arch.is_routed_unit(action.unit):
            assert routed is not None
            exchange = routed[action.unit, action.micro]
        yield from transfers(plan, steps, action, exchange)


def tally(transfers: Iterable[Transfer], transport: Transport) -> tuple[Row, ...]:
    """Transfers added up into rows, in the order of their first call."""
    calls: dict[Transfer, int] = {}
    for each in transfers:
        calls[each] = calls.get(each, 0) + 1
    sums: dict[tuple[GroupName, Operation, Phase], list[int]] = {}
    for each, count in calls.items():
        operation, payload, ranks = each.operation, each.payload_bytes, each.ranks
        row = sums.setdefault((each.group, operation, each.phase), [0, 0, 0, 0, 0])
        row[0] = max(row[0], ranks)
        row[1] += count
        row[2] += count * payload
        row[3] += count * sent_bytes(operation, payload, ranks)
        row[4] += count * each.wire_bytes(transport)
    return tuple(Row(group, row[0], operation, phase, *row[1:]) for (group, operation, phase), row in sums.items())
