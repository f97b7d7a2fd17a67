"""A world of any size on one process: groups that exist, and whose collectives move nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

__all__ = ["pretended_world"]


@contextmanager
def pretended_world(rank: int, ranks: int) -> Iterator[None]:
    """This process is `rank` of `ranks` for the length of the block: torch's fake backend answers for the others.

    Raises RuntimeError where this process belongs to a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process belongs to a process group: dry runs need one without")
    dist.init_process_group("fake", rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
