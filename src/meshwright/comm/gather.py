"""Small integers of every rank, seen by every rank: for checks and reports, outside the ledger of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwright.comm.communicator import Communicator
from meshwright.comm.mesh import Mesh
from meshwright.layout.groups import GroupName

__all__ = ["gather_integers", "gather_integers_over", "gather_text"]


def gather_integers(mesh: Mesh, values: Sequence[int]) -> list[list[int]]:
    """Equally many 63-bit integers from each rank -> result[rank]. Collective over the world; not counted.

    Rows of one table, added up: each rank fills its own and leaves the others zero.
    """
    if mesh.degrees.ranks == 1:
        return [list(values)]
    return gather_integers_over(mesh.communicator(GroupName.WORLD), values)


def gather_integers_over(over: Communicator, values: Sequence[int]) -> list[list[int]]:
    """The same over the ranks of one group -> result[place]."""
    device = torch.device("cuda" if dist.get_backend(over.process_group) == "nccl" else "cpu")
    table = torch.zeros(over.size, len(values), dtype=torch.int64, device=device)
    table[over.place] = torch.tensor(list(values), dtype=torch.int64)
    dist.all_reduce(table, group=over.process_group)
    rows: list[list[int]] = table.tolist()
    return rows


def gather_text(mesh: Mesh, text: str, limit: int = 512) -> list[str]:
    """A short text of each rank -> result[rank]; cut at `limit` bytes. Collective over the world; not counted."""
    coded = text.encode()[:limit]
    rows = gather_integers(mesh, [*coded, *[0] * (limit - len(coded))])
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
