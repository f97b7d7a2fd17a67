"""What one rank sends in a step: the fold of its program, and what axes without a program of their own declare.

A program grows with the micro-batches of a step, its rows only in number: those of a long step are read off two short
ones, exactly (`tests/unit/price/test_traffic.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.arch.tensors import UnitKind
from meshwright.config.choices import Context, Recompute
from meshwright.layout.groups import GroupName
from meshwright.plan.action import Phase
from meshwright.plan.folds.ledger import Row, ledger
from meshwright.plan.folds.traffic import Transport, sent_bytes, wire_bytes
from meshwright.plan.operation import Operation
from meshwright.plan.plan import Plan
from meshwright.plan.stages import stage_units

_LONG = 600  # (unit, micro-batch) pairs on a stage: longer steps are read off shorter ones


def traffic(plan: Plan, rank: int, transport: Transport = Transport.DIRECT) -> tuple[Row, ...]:
    """Rows of one step on `rank`, in the order of their first call."""
    return (*_program(plan, rank, transport), *_declared(plan, rank, transport))


def _program(plan: Plan, rank: int, transport: Transport) -> tuple[Row, ...]:
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


def _declared(plan: Plan, rank: int, transport: Transport) -> Iterator[Row]:
    """The context and expert axes: per block, micro-batch and pass."""
    stage = plan.degrees.coordinates(rank).pp
    blocks = [unit for unit in stage_units(plan, stage) if plan.arch.unit_kind(unit) is UnitKind.BLOCK]
    routed = [unit for unit in blocks if plan.arch.is_routed(unit - 1)]
    again = plan.execution.recompute is Recompute.FULL
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        passes = plan.accumulation
        for operation, payload, calls in _context(plan, phase is Phase.BACKWARD, again):
            yield _row(
                GroupName.CP, plan.degrees.cp, operation, phase, calls * len(blocks) * passes, payload, transport
            )
        if plan.degrees.ep > 1 and routed:
            calls = (2 + 2 * (again and phase is Phase.BACKWARD)) * len(routed) * passes
            size = (
                _tokens(plan) * plan.arch.hidden * _width(plan) * (plan.arch.experts.active if plan.arch.experts else 0)
            )
            yield _row(GroupName.EP, plan.degrees.ep, Operation.ALL_TO_ALL, phase, calls, size, transport)


def _context(plan: Plan, backward: bool, again: bool) -> Iterator[tuple[Operation, int, int]]:
    """(operation, payload of a call, calls a block)."""
    cp, arch = plan.degrees.cp, plan.arch
    if cp == 1:
        return
    heads = max(arch.kv_heads // plan.degrees.tp, 1)
    tokens = plan.batch.micro * (plan.data.sequence_length // cp)
    block = tokens * heads * (arch.head_dim + arch.value_dim) * _width(plan)
    passes = 1 + again if backward else 1
    match plan.context.kind:
        case Context.RING:
            yield Operation.SEND, block, (cp - 1) * (1 if not backward else 2 + again)
        case Context.ALLGATHER:
            if not backward or again:
                yield Operation.ALL_GATHER, block * cp, 1
            if backward:
                yield Operation.REDUCE_SCATTER, block * cp, 1
        case Context.ULYSSES:
            query = tokens * arch.heads // plan.degrees.tp * arch.head_dim * _width(plan)
            yield Operation.ALL_TO_ALL, query, 2 * passes
            yield Operation.ALL_TO_ALL, block // 2, 2 * passes


def _row(
    group: GroupName, ranks: int, operation: Operation, phase: Phase, calls: int, payload: int, transport: Transport
) -> Row:
    return Row(
        group, ranks, operation, phase, calls, calls * payload, calls * sent_bytes(operation, payload, ranks),
        calls * wire_bytes(transport, operation, payload, ranks),
    )  # fmt: skip


def _tokens(plan: Plan) -> int:
    cut = plan.degrees.tp if plan.execution.sequence else 1
    return plan.batch.micro * (plan.data.sequence_length // plan.degrees.cp) // cut


def _width(plan: Plan) -> int:
    return max(2, plan.precision.compute.num_bytes)
