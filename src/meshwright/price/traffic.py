"""What one rank sends in a step: the fold of its program, with even loads of experts.

A program grows with the micro-batches of a step, its rows only in number: those of a long step are read off two short
ones, exactly (`tests/unit/price/test_traffic.py`).
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.plan.folds.ledger import Row, ledger
from meshwright.plan.folds.traffic import Transport
from meshwright.plan.plan import Plan
from meshwright.plan.stages import stage_units

_LONG = 600  # (unit, micro-batch) pairs on a stage: longer steps are read off shorter ones


def traffic(plan: Plan, rank: int, transport: Transport = Transport.DIRECT) -> tuple[Row, ...]:
    """Rows of one step on `rank`, in the order of their first call."""
    pp, units = plan.degrees.pp, len(stage_units(plan, plan.degrees.coordinates(rank).pp))
    short = pp * 2
    if plan.accumulation * units <= _LONG or plan.accumulation <= 3 * pp:
        return ledger(plan, rank, transport=transport)
    fewer, more = (ledger(_shortened(plan, count), rank, transport=transport) for count in (short, short + pp))
    steps, left = divmod(plan.accumulation - short, pp)
    if left:  # not a whole number of rounds: schedules that need one refuse such a step anyway
        fewer = ledger(_shortened(plan, short + left), rank, transport=transport)
        more = ledger(_shortened(plan, short + left + pp), rank, transport=transport)
    return tuple(_extended(one, other, steps) for one, other in zip(fewer, more, strict=True))


def _shortened(plan: Plan, accumulation: int) -> Plan:
    ranks = plan.degrees.dp * plan.degrees.ep
    return replace(plan, batch=replace(plan.batch, sequences=plan.batch.micro * ranks * accumulation))


def _extended(fewer: Row, more: Row, steps: int) -> Row:
    """A row of `steps` more rounds than `fewer`; `more` has one."""

    def after(low: int, high: int) -> int:
        return low + steps * (high - low)

    return replace(
        fewer,
        calls=after(fewer.calls, more.calls),
        payload_bytes=after(fewer.payload_bytes, more.payload_bytes),
        sent_bytes=after(fewer.sent_bytes, more.sent_bytes),
        wire_bytes=after(fewer.wire_bytes, more.wire_bytes),
    )
