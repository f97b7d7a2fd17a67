"""Ranks that meet more than once: groups of the first few of them, one after the other, through one store.

    rank 0   | group of 1 |   group of 2   |  group of 4  |
    rank 1   | waits      |   group of 2   |  group of 4  |
    rank 2   | waits      |   waits        |  group of 4  |        who is not needed waits for the end of the group,
    rank 3   | waits      |   waits        |  group of 4  |        however long it takes, and hears of a failure

A rank that waited inside the next group instead would give up after the time that a collective may take.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]  # public, not exported by name

from meshwright.launch.environment import JoinError, Place
from meshwright.launch.join import TIMEOUT_S, leave, meet, start_group

__all__ = ["Meeting"]

_POLL_S = 0.01
_FAILED = "failed"


class Meeting:
    """Ranks 0 to `world` - 1, of which this is `rank`; `store` is theirs alone."""

    def __init__(
        self, store: Store, rank: int, world: int, device: str = "cpu", local_rank: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:  # fmt: skip
        self.rank, self.world = rank, world
        self._store, self._device, self._timeout_s = store, device, timeout_s
        self._local_rank = rank if local_rank is None else local_rank
        self._groups = 0

    @classmethod
    @contextlib.contextmanager
    def at(cls, place: Place, device: str = "cpu", timeout_s: float = TIMEOUT_S) -> Iterator[Meeting]:
        """The ranks of a launcher. Raises JoinError as `join` does; a rank that fails inside tells the others."""
        meeting = cls(meet(place, timeout_s), place.rank, place.world, device, place.local_rank, timeout_s)
        with meeting._telling_failures():
            yield meeting
            meeting._part()

    @classmethod
    def through(cls, file: Path, rank: int, world: int, device: str = "cpu", timeout_s: float = TIMEOUT_S) -> Meeting:
        """Ranks of one host that share a file."""
        return cls(FileStore(str(file), world), rank, world, device, timeout_s=timeout_s)

    @contextlib.contextmanager
    def group(self, size: int) -> Iterator[bool]:
        """The default process group of ranks 0 to `size` - 1, for the length of a `with`: whether this rank is in it.

        One rank alone needs no group and gets none. All ranks go on when the last has left. All call this in one order.
        """
        name, member = f"group {self._groups}", self.rank < size
        self._groups += 1
        with self._telling_failures():
            if member and size > 1:
                store = PrefixStore(name, self._store)
                start_group(store, self.rank, size, self._device, self._local_rank, self._timeout_s)
            yield member
            leave()  # not after an error: a group left in mid-collective may abort in its destructor
        if member and self._store.add(f"{name} left", 1) == size:
            self._store.set(f"{name} over", "")
        self._await(f"{name} over")

    def tell(self, key: str, value: str) -> None:
        """Leave a word for the others."""
        self._store.set(f"told {key}", value)

    def hear(self, key: str) -> str:
        """What another rank told, once it did. Raises JoinError where a rank failed."""
        self._await(f"told {key}")
        return self._store.get(f"told {key}").decode()

    def _part(self) -> None:
        """Rank 0 may serve the store: it leaves when all others have heard their last word."""
        if self._store.add("parted", 1) == self.world:
            self._store.set("all parted", "")
        if self.rank == 0:
            self._await("all parted")

    @contextlib.contextmanager
    def _telling_failures(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that served it
                self._store.compare_set(_FAILED, "", str(self.rank))
            raise

    def _await(self, key: str) -> None:
        while not self._store.check([key]):
            if self._store.check([_FAILED]):
                raise JoinError(f"stopped because of rank {self._store.get(_FAILED).decode()}")
            time.sleep(_POLL_S)
