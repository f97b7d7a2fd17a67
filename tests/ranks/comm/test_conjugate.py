"""Conjugate pairs: values and gradients against their definition, to the bit, and counted under `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from meshwright.comm.conjugate import copied, exchanged, gathered, scattered, scattered_beside, summed
from meshwright.comm.mesh import Mesh
from meshwright.comm.registry import registered
from meshwright.layout.groups import GroupName
from meshwright.plan.action import Phase
from meshwright.plan.operation import Operation
from meshwright.testing.exact import check_equal, numbered
from meshwright.testing.ranks import run_cases

ROWS, COLUMNS = 12, 5  # rows divide by two and three ranks; the numbers are small integers, so sums are exact


@dataclass(frozen=True)
class Pair:
    """`forward` and `backward` are the operations that must be seen; `cut` says whether input and output are chunks."""

    name: str
    function: Callable[[Tensor, str], Tensor]
    cut: tuple[bool, bool]
    forward: Operation | None
    backward: Operation | None


PAIRS = [
    Pair("f", copied, (False, False), None, Operation.ALL_REDUCE),
    Pair("f*", summed, (False, False), Operation.ALL_REDUCE, None),
    Pair("g", gathered, (True, False), Operation.ALL_GATHER, Operation.REDUCE_SCATTER),
    Pair("g*", scattered, (False, True), Operation.REDUCE_SCATTER, Operation.ALL_GATHER),
]


def of_rank(rank: int, start: int) -> Tensor:
    """What a rank brings; every rank can make every other's."""
    return numbered(ROWS, COLUMNS, start=start + 7 * rank).double()


def expected(operation: Operation | None, values: list[Tensor], rank: int) -> Tensor:
    match operation:
        case None:
            return values[rank]
        case Operation.ALL_REDUCE:
            return torch.stack(values).sum(0)
        case Operation.REDUCE_SCATTER:
            return torch.stack(values).sum(0).chunk(len(values))[rank]
        case _:
            return torch.cat(values)


def chunk(cut: bool, values: list[Tensor]) -> list[Tensor]:
    return [value.chunk(len(values))[rank] if cut else value for rank, value in enumerate(values)]


def agrees(rank: int, pair: Pair, world: int, compiled: bool) -> None:
    mesh = Mesh(tp=world).start()
    name = f"{pair.name} of {world}"
    with registered({name: mesh.communicator(GroupName.TP)}):

        def function(x: Tensor) -> Tensor:
            return pair.function(x, name) * 2

        run = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
        xs = chunk(pair.cut[0], [of_rank(r, 1) for r in range(world)])
        gs = chunk(pair.cut[1], [of_rank(r, 100) for r in range(world)])
        x = xs[rank].clone().requires_grad_()
        mesh.ledger.phase = Phase.FORWARD
        y = run(x)
        mesh.ledger.phase = Phase.BACKWARD
        y.backward(gs[rank])
        check_equal(y.detach(), 2 * expected(pair.forward, xs, rank), "forward")
        assert x.grad is not None
        check_equal(x.grad, 2 * expected(pair.backward, gs, rank), "backward")
        seen = {(row.operation, row.phase, row.calls, row.payload_bytes) for row in mesh.ledger.rows}
        wanted = ((pair.forward, Phase.FORWARD), (pair.backward, Phase.BACKWARD))
        assert seen == {(op, phase, 1, ROWS * COLUMNS * 8) for op, phase in wanted if op is not None}
    mesh.close()


@pytest.mark.parametrize("world", [2, 3])
def test_each_is_the_gradient_of_the_other(world: int) -> None:
    run_cases(agrees, world, PAIRS, world, False)


def test_compiled_graphs_count_what_they_send() -> None:
    run_cases(agrees, 2, PAIRS, 2, True)


def beside(rank: int, compiled: bool) -> None:
    mesh = Mesh(tp=2).start()
    with registered({"tp": mesh.communicator(GroupName.TP)}):
        xs, whole = [of_rank(r, 1) for r in range(2)], of_rank(0, 50)
        gs = [of_rank(r, 100).chunk(2)[r] for r in range(2)]
        x, side = xs[rank].clone().requires_grad_(), whole.clone().requires_grad_()

        def function(x: Tensor, side: Tensor) -> Tensor:
            return scattered_beside(x, side, "tp")

        run = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
        y = run(x, side)
        y.backward(gs[rank])
        check_equal(y.detach(), (xs[0] + xs[1] + whole).chunk(2)[rank], "forward")
        assert x.grad is not None
        assert side.grad is not None
        check_equal(x.grad, torch.cat(gs), "gradient of the part")
        check_equal(side.grad, torch.cat(gs), "gradient of what is whole")
        assert sum(row.calls for row in mesh.ledger.rows) == 2
    mesh.close()


def test_what_is_whole_joins_a_scatter_once() -> None:
    run_cases(beside, 2, [False, True])


SENT = ((1, 3), (0, 2))
"""Rows that each of two ranks sends to each, of five and three that it has; the rank at 0 makes room for two."""
HELD, ROOM = (5, 3), (2, 5)


def travels(rank: int, compiled: bool) -> None:
    """Runs of rows go and their gradients come back; what was not sent has none, what did not come is zero."""
    mesh = Mesh(ep=2).start()
    with registered({"ep": mesh.communicator(GroupName.EP)}):
        xs = [numbered(rows, 2, start=1 + 20 * r).double() for r, rows in enumerate(HELD)]
        gs = [numbered(rows, 2, start=100 + 20 * r).double() for r, rows in enumerate(ROOM)]
        received = [row[rank] for row in SENT]

        def function(x: Tensor) -> Tensor:
            return exchanged(x, list(SENT[rank]), received, ROOM[rank], "ep") * 2

        run = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
        x = xs[rank].clone().requires_grad_()
        y = run(x)
        y.backward(gs[rank])
        came = torch.cat([x.split([*sent, len(x) - sum(sent)])[rank] for x, sent in zip(xs, SENT, strict=True)])
        check_equal(y.detach(), 2 * torch.cat((came, came.new_zeros(ROOM[rank] - len(came), 2))), "forward")
        first = [sum(row[r] for row in SENT[:rank]) for r in range(2)]  # rows of ranks before it at each place
        back = [gs[r][first[r] : first[r] + SENT[rank][r]] for r in range(2)]
        assert x.grad is not None
        unsent = x.grad.new_zeros(HELD[rank] - sum(SENT[rank]), 2)
        check_equal(x.grad, 2 * torch.cat((*back, unsent)), "backward")
        (row,) = mesh.ledger.rows
        assert (row.calls, row.payload_bytes) == (2, 16 * (sum(SENT[rank]) + sum(received)))
        assert row.wire_bytes == 16 * (SENT[rank][1 - rank] + received[1 - rank])
    mesh.close()


def test_rows_travel_and_their_gradients_come_back() -> None:
    run_cases(travels, 2, [False, True])
