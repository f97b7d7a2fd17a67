"""A communicator: one group of the mesh as this rank sees it, with the ledger that counts what it carries."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from meshwright.comm.ledger import Ledger
from meshwright.layout.groups import GroupName
from meshwright.plan.folds.traffic import Transport


@dataclass(frozen=True, slots=True)
class Communicator:
    """`ranks` are global, in the order of their place in the group; `process_group` carries them all."""

    name: GroupName
    ranks: tuple[int, ...]
    place: int
    process_group: dist.ProcessGroup
    ledger: Ledger
    pipeline: int = 0
    """Of a link between two stages: the ranks of the pipeline that it is a part of, which the ledger names."""
    ring: bool = False
    """Whether what is gathered or scattered beside products goes round in chunks, under them: see `comm.ring`."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def direct(self) -> bool:
        """Whether shards are exchanged point to point instead of by the backend's own collectives."""
        return self.ledger.transport is Transport.DIRECT
