"""Collectives that go point to point, whatever the order in which ranks launch them."""

import torch

from meshwright.comm.mesh import Mesh
from meshwright.comm.operations import all_gather, reduce_scatter
from meshwright.layout.groups import GroupName
from meshwright.plan.action import Phase
from meshwright.testing.exact import numbered
from meshwright.testing.ranks import run

WORLD = 2


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
