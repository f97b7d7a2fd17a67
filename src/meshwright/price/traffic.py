"""What one rank sends in a step: the fold of its program, which takes even loads of experts, and what an axis without a
program of its own declares (cp).

A program grows with the micro-batches of a step, its rows only in number: those of a long step are read off two short
ones, exactly (`tests/unit/price/test_traffic.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.arch.parameters import unit_tensors
from meshwright.arch.tensors import LogicalAxis, UnitKind
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
    program = _program(plan, rank, transport)
    if plan.degrees.ep > 1 and all(row.group is not GroupName.EXPERT for row in program):
        program = tuple(_experts_apart(plan, rank, program, transport))
    return (*program, *_declared(plan, rank, transport))


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


def _experts_apart(plan: Plan, rank: int, program: tuple[Row, ...], transport: Transport) -> Iterator[Row]:
    """The rows of a program that knows no expert axis, experts taken from those of all replicas: a rank has its own
    1/ep of them, which the dp x cp ranks of their group share.

    What a row moves of experts is what it moves more where they are twice as wide.
    """
    experts = plan.arch.experts
    if experts is None:
        yield from program
        return
    wide = replace(plan, arch=replace(plan.arch, experts=replace(experts, ffn=2 * experts.ffn)))
    group = plan.degrees.dp * plan.degrees.cp
    for row, wider in zip(program, _program(wide, rank, transport), strict=True):
        moved = wider.payload_bytes - row.payload_bytes
        if row.group not in _OF_REPLICAS or not moved:
            yield row
            continue
        width = (plan.precision.reduce if row.phase is Phase.REDUCE else plan.precision.compute).num_bytes
        calls = round(moved / ((_block_elements(wide) - _block_elements(plan)) * width / plan.degrees.tp))
        size = _block_elements(plan, LogicalAxis.EXPERTS) // plan.degrees.tp * width  # of one block, in one call
        yield _less(row, _row(row.group, row.ranks, row.operation, row.phase, calls, size, transport))
        if group > 1 and row.group is not GroupName.COPY:  # their sums meet once, over all that share them
            own = size // plan.degrees.ep
            yield _row(GroupName.EXPERT, group, row.operation, row.phase, calls, own, transport)


_OF_REPLICAS = (GroupName.DENSE, GroupName.SHARD, GroupName.COPY)


def _block_elements(plan: Plan, axis: LogicalAxis | None = None) -> int:
    """Elements of a block with experts, or of those of its tensors that have `axis`."""
    unit = next(unit for unit in range(1, plan.arch.head_unit) if plan.arch.is_routed(unit - 1))
    return sum(each.numel for each in unit_tensors(plan.arch, unit) if axis is None or axis in each.axes)


def _less(row: Row, part: Row) -> Row:
    """A row without the bytes of `part`; its calls stay, for each moves something else besides."""
    return replace(
        row,
        payload_bytes=row.payload_bytes - part.payload_bytes,
        sent_bytes=row.sent_bytes - part.sent_bytes,
        wire_bytes=row.wire_bytes - part.wire_bytes,
    )


def _declared(plan: Plan, rank: int, transport: Transport) -> Iterator[Row]:
    """The context axis: per block, micro-batch and pass."""
    stage = plan.degrees.coordinates(rank).pp
    blocks = [unit for unit in stage_units(plan, stage) if plan.arch.unit_kind(unit) is UnitKind.BLOCK]
    again = plan.execution.recompute is Recompute.FULL
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        passes = plan.accumulation
        for operation, payload, calls in _context(plan, phase is Phase.BACKWARD, again):
            yield _row(
                GroupName.CP, plan.degrees.cp, operation, phase, calls * len(blocks) * passes, payload, transport
            )


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
