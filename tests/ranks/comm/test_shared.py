"""Memory that ranks of one machine share: seen by all, without a name, and none where one of them has none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import shared
from meshwright.comm.mesh import Mesh
from meshwright.comm.shared import shared_zeros
from meshwright.layout.groups import GroupName
from meshwright.testing.ranks import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")
WORLD, NUMEL = 3, 5000


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def writes_and_reads(rank: int) -> tuple[list[list[float]], int, set[str]]:
    """What each rank finds in all parts, the descriptors it keeps, and the names of what it has mapped."""
    over = Mesh(dp=WORLD).start().communicator(GroupName.DENSE)
    over.ledger.clear()
    before = descriptors()
    parts = shared_zeros(over, NUMEL, torch.float64)
    assert parts is not None
    assert over.ledger.rows == ()
    assert not any(bool(part.any()) for part in parts)
    dist.barrier()
    parts[rank].fill_(rank + 1)
    dist.barrier()
    maps = Path("/proc/self/maps").read_text().splitlines()
    names = {line.split(maxsplit=5)[5] for line in maps if "meshwright (" in line}
    return [part.unique().tolist() for part in parts], descriptors() - before, names


def test_each_rank_reads_what_the_others_wrote_and_no_file_is_left() -> None:
    for found, kept, names in run(writes_and_reads, WORLD):
        assert found == [[1.0], [2.0], [3.0]]
        assert kept == 0
        assert names == {"/memfd:meshwright (deleted)"}


def has_none(rank: int, what: str) -> bool:
    """Rank 1 cannot do its part."""
    over = Mesh(dp=WORLD).start().communicator(GroupName.DENSE)
    if rank == 1:
        replaced = {"_make": lambda _: -1, "_map": lambda *_: None, "_machine": lambda: 7}[what]
        setattr(shared, what, replaced)
    before = descriptors()
    none = shared_zeros(over, NUMEL, torch.float32) is None
    return none and descriptors() == before


@pytest.mark.parametrize("what", ["_make", "_map", "_machine"])
def test_where_one_rank_cannot_nobody_does(what: str) -> None:
    assert run(has_none, WORLD, what) == [True] * WORLD
