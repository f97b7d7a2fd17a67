"""A side channel between all ranks for small messages: what they agree on, beside the mesh's communicators.

It has a group of its own, on gloo whatever the backend of the mesh, so that a background thread may use it while the
step's collectives run. Messages are bytes; nothing is pickled. Its traffic is in no ledger: it belongs to no step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.config.errors import RequestError

__all__ = ["Side", "refused_by", "refused_together", "words"]

T = TypeVar("T")

_BITS = (1 << 64) - 1


class Side:
    """Made by all ranks together, and used by all in the same order; one process without a group is a side of one."""

    def __init__(self) -> None:
        joined = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if joined else 0
        self.size = dist.get_world_size() if joined else 1
        self._group = dist.new_group(backend="gloo", group_desc="side") if joined else None
        if self._group is not None:
            dist.barrier(group=self._group)  # nobody closes it before all are connected

    def total(self, values: Sequence[int]) -> list[int]:
        """The sum of each value over the ranks, mod 2^64; as many values on every rank."""
        if self._group is None or not values:
            return [value & _BITS for value in values]
        words = torch.tensor([_signed(value) for value in values], dtype=torch.int64)
        dist.all_reduce(words, group=self._group)
        return [int(word) & _BITS for word in words]

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in their order, at rank 0; elsewhere nothing."""
        if self._group is None:
            return [message]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(message)]), group=self._group)
        longest = max(int(length) for length in lengths)
        own = torch.zeros(max(longest, 1), dtype=torch.uint8)
        own[: len(message)] = _tensor(message)
        if self.rank:
            dist.gather(own, dst=0, group=self._group)
            return []
        arrived = [torch.empty_like(own) for _ in range(self.size)]
        dist.gather(own, arrived, dst=0, group=self._group)
        return [_bytes(data[: int(length)]) for data, length in zip(arrived, lengths, strict=True)]

    def broadcast(self, message: bytes = b"") -> bytes:
        """What rank 0 says, on every rank."""
        if self._group is None:
            return message
        length = torch.tensor([len(message)])
        dist.broadcast(length, src=0, group=self._group)
        data = _tensor(message) if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        if int(length):
            dist.broadcast(data, src=0, group=self._group)
        return _bytes(data)

    def together(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in their order, on every rank."""
        parts = self.gather(message)
        lengths = self.broadcast(b"".join(len(part).to_bytes(8, "little") for part in parts))
        joined = self.broadcast(b"".join(parts))
        out, first = [], 0
        for place in range(0, len(lengths), 8):
            size = int.from_bytes(lengths[place : place + 8], "little")
            out.append(joined[first : first + size])
            first += size
        return out

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def refused_together(side: Side, action: Callable[[], T]) -> T:
    """Do `action` on every rank; where it refuses the request on one, all raise that refusal. Collective."""
    try:
        result, refusal = action(), None
    except RequestError as error:
        result, refusal = None, error
    for rank, message in enumerate(side.together(words(refusal))):
        if message:
            raise refused_by(side, rank, message, refusal)
    return result  # type: ignore[return-value]


def words(refusal: RequestError | None) -> bytes:
    """A refusal as a message between ranks; empty for none."""
    if refusal is None:
        return b""
    value, rule = (refusal.value, refusal.rule) if not refusal.problems else (str(refusal), "")
    return json.dumps([value, rule, refusal.nearest]).encode()


def refused_by(side: Side, rank: int, message: bytes, own: RequestError | None = None) -> RequestError:
    """What to raise here of a refusal of `rank`: there the very error, elsewhere that it stops because of that one."""
    if rank == side.rank and own is not None:
        return own
    value, rule, nearest = json.loads(message)
    return RequestError(f"stopped because of rank {rank}: {value}", rule, nearest)


def _tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)


def _bytes(data: Tensor) -> bytes:
    return data.numpy().tobytes()


def _signed(value: int) -> int:
    value &= _BITS
    return value - (1 << 64) if value >> 63 else value
