"""Memory that the ranks of one machine share: each writes its own part, all read every part, and nothing is sent.

    rank 0   [ own ] [  1  ] [  2  ]       own      written by this rank alone
    rank 1   [  0  ] [ own ] [  2  ]       others   mapped, and read where they lie
    rank 2   [  0  ] [  1  ] [ own ]

The memory has no name in any folder, so nothing is left of it however a rank ends; who has mapped it keeps it.

Nobody waits here. Whoever writes must know that no one reads any more, and whoever reads that all have written. A
training step knows both from collectives that it makes anyway:

    rank 0   | count |  gathers: read all  | norm |  update: write own  | count | ...
    rank 1   | count |  gathers: read all  | norm |  update: write own  | count | ...
             ^ all have written            ^ all have read
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.communicator import Communicator
from meshwright.comm.gather import gather_integers_over

__all__ = ["shared_zeros"]

_NONE = -1


def shared_zeros(over: Communicator, numel: int, dtype: torch.dtype) -> list[Tensor] | None:
    """(numel,) zeros of each rank of the group, by place; `over.place` is the one to write. Collective over the group.

    None, on all of them, unless they run on one Linux machine that lets each open the others' memory. Not counted.
    """
    if dist.get_backend(over.process_group) != "gloo":
        return None
    own = _make(numel * dtype.itemsize)
    told = gather_integers_over(over, [_machine(), os.getpid(), own])
    together = len({machine for machine, _, _ in told}) == 1
    mapped = [_map(process, descriptor, numel, dtype) for _, process, descriptor in told] if together else []
    parts = [each for each in mapped if each is not None]
    # This also tells that all have opened what they need.
    complete = all(has_all for (has_all,) in gather_integers_over(over, [len(parts) == over.size]))
    if own != _NONE:
        os.close(own)
    return parts if complete else None


def _machine() -> int:
    """Equal for processes of one kernel, one space of process numbers and one network: others count as far away."""
    if sys.platform != "linux":
        return _NONE
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{each}") for each in ("pid", "net")]
    return int.from_bytes(hashlib.blake2b("".join([boot, *spaces]).encode(), digest_size=7).digest())


def _make(num_bytes: int) -> int:
    """A descriptor of memory without a name, zeros; -1 where there is none to be had."""
    if sys.platform != "linux":
        return _NONE
    try:
        descriptor = os.memfd_create("meshwright")
    except OSError:
        return _NONE
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # taken now: a page that is missing later would end the process
    except OSError:
        os.close(descriptor)
        return _NONE
    return descriptor


def _map(process: int, descriptor: int, numel: int, dtype: torch.dtype) -> Tensor | None:
    """The memory behind another process's descriptor; None where this one may not see it."""
    path = Path(f"/proc/{process}/fd/{descriptor}")
    if descriptor == _NONE or not os.access(path, os.R_OK | os.W_OK):
        return None
    try:
        return torch.from_file(str(path), shared=True, size=numel, dtype=dtype)  # keeps no descriptor; mmap.mmap would
    except RuntimeError:
        return None
