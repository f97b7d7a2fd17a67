"""What a place for checkpoints can do. Paths are relative to its root, with "/".

Every step that changes something is announced first, by name, to a listener that a storage may be given: that is where
a test makes a machine crash, a disk fill up or a writer dawdle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["At", "Buffer", "Reading", "Storage", "Writing", "nothing", "write_small"]

Buffer = bytes | bytearray | memoryview

At = Callable[[str], None]
"""Hears the name of a step before it is done."""


def nothing(step: str) -> None:
    """Nobody listens."""


class Reading(Protocol):
    """An open file of `size` bytes."""

    @property
    def size(self) -> int: ...

    @property
    def request_bytes(self) -> int:
        """How much to ask for at once, where as much is wanted."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` from byte `offset` on. Raises DamagedError where the file ends before."""

    def close(self) -> None: ...


class Writing(Protocol):
    """A file under way."""

    def write(self, data: Buffer) -> None: ...

    def finish(self) -> None:
        """Returns when the content would survive a loss of power."""

    def abandon(self) -> None:
        """Close what is not finished, without caring what becomes of it; nothing happens after `finish`."""


class Storage(Protocol):
    """A root under which checkpoints are kept."""

    address: str
    """As the user wrote it."""
    renames: bool
    """Whether `rename` publishes a folder at once; where it does not, the manifest does."""
    shared: bool
    """Whether other processes, now and later, find what one has written."""

    def where(self, path: str) -> str:
        """How messages name `path`."""

    def names(self, folder: str) -> list[str]:
        """What a folder holds, sorted; nothing where there is no such folder."""

    def read(self, path: str) -> bytes | None:
        """A small file's content; None where there is none."""

    def open(self, path: str) -> Reading:
        """Raises DamagedError where there is no regular file."""

    def create(self, path: str) -> Writing: ...

    def put(self, path: str, data: bytes) -> None:
        """Replace a small file at once: a reader sees the old or the new content, even after a loss of power."""

    def make(self, folder: str) -> None: ...

    def rename(self, source: str, target: str) -> None: ...

    def remove(self, path: str) -> None:
        """A file; nothing happens where there is none."""

    def remove_folder(self, folder: str) -> None: ...

    def free_bytes(self) -> int | None:
        """None where nobody says."""


def write_small(storage: Storage, path: str, data: Buffer) -> None:
    """A whole file, flushed; where that fails, whatever was written of it is left behind."""
    writing = storage.create(path)
    try:
        writing.write(data)
        writing.finish()
    except BaseException:
        writing.abandon()
        raise
