"""Collectives that go point to point, whatever the order in which ranks launch them."""

import torch

from meshwright.comm.mesh import Mesh
from meshwright.comm.operations import all_gather, all_to_all, reduce_scatter
from meshwright.layout.groups import GroupName
from meshwright.plan.action import Phase
from meshwright.testing.exact import numbered
from meshwright.testing.ranks import run

WORLD = 2
ROWS = ((1, 0, 2), (3, 1, 0), (0, 2, 1))
"""Rows that each of three ranks sends to each."""


def mixed(rank: int) -> tuple[list[float], list[float]]:
    """A gather and a sum under way at once; rank 1 launches them in the other order."""
    over = Mesh(dp=WORLD).start().communicator(GroupName.DENSE)
    gathered = torch.zeros(2 * WORLD)
    gathered[2 * rank : 2 * rank + 2] = numbered(2, start=10 * (rank + 1))
    whole, own = numbered(2 * WORLD, start=100 * (rank + 1)), torch.empty(2)
    launches = [
        lambda: all_gather(over, gathered, Phase.FORWARD),
        lambda: reduce_scatter(over, whole, own, Phase.REDUCE),
    ]
    for handle in [launch() for launch in (reversed(launches) if rank else launches)]:
        handle.wait()
    return gathered.tolist(), own.tolist()


def test_gathers_meet_gathers_and_sums_meet_sums() -> None:
    assert run(mixed, WORLD) == [
        ([10, 11, 20, 21], [300, 302]),
        ([10, 11, 20, 21], [304, 306]),
    ]


def uneven(rank: int) -> tuple[list[list[float]], list[list[float]], tuple[int, int]]:
    """Rows of two numbers, (sender, receiver), to each rank as many as `ROWS` say; and the same way back."""
    over = Mesh(dp=len(ROWS)).start().communicator(GroupName.DENSE)
    sent, kept = ROWS[rank], [row[rank] for row in ROWS]
    inp = torch.tensor([[rank, to] for to, rows in enumerate(sent) for _ in range(rows)], dtype=torch.float64)
    out, back = inp.new_zeros(sum(kept), 2), torch.zeros_like(inp)
    all_to_all(over, out, inp, kept, sent, Phase.FORWARD).wait()
    all_to_all(over, back, out, sent, kept, Phase.BACKWARD).wait()
    assert torch.equal(back, inp)
    even = torch.zeros(3, dtype=torch.float64)
    all_to_all(over, even, numbered(3, start=10 * rank).double(), (), (), Phase.FORWARD).wait()
    first = over.ledger.rows[0]
    return out.tolist(), even.tolist(), (first.calls, first.payload_bytes)


def test_rows_reach_whom_they_are_for_however_many_they_are() -> None:
    sizes = [16 * sum(row) + 24 for row in ROWS]
    assert run(uneven, len(ROWS)) == [
        ([[0, 0], [1, 0], [1, 0], [1, 0]], [0, 10, 20], (2, sizes[0])),
        ([[1, 1], [2, 1], [2, 1]], [1, 11, 21], (2, sizes[1])),
        ([[0, 2], [0, 2], [2, 2]], [2, 12, 22], (2, sizes[2])),
    ]
