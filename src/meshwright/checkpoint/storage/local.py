"""A folder of this machine or of a shared file system."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from meshwright.checkpoint.errors import DamagedError
from meshwright.checkpoint.storage.interface import At, Buffer, Reading, Writing, nothing, write_small
from meshwright.checkpoint.storage.writeback import WRITEBACK_BYTES, start_writeback

__all__ = ["Local"]

_CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""No links are followed, and nobody waits for the other end of a pipe."""
_BUFFER_BYTES = 1 << 17
"""Small tensors are written together. What is larger than the buffer, as the runs of a save are, goes past it without
a copy; what just fills it would be copied."""


class Local:
    """Changes are flushed, the folders' own entries too; a rename publishes."""

    renames = True
    shared = True

    def __init__(self, root: Path, at: At = nothing) -> None:
        self.address = str(root)
        self._root = root
        self._at = at

    def where(self, path: str) -> str:
        return str(self._root / path)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self._root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, path: str) -> bytes | None:
        file = self._root / path
        if not os.path.lexists(file) or file.is_dir():
            return None
        reading = self.open(path)
        try:
            content = bytearray(reading.size)
            reading.read_into(0, memoryview(content))
            return bytes(content)
        finally:
            reading.close()

    def open(self, path: str) -> Reading:
        return _LocalReading(self._root / path)

    def create(self, path: str) -> Writing:
        self._at(f"create {path}")
        return _LocalWriting(self._root / path, path, self._at)

    def put(self, path: str, data: bytes) -> None:
        draft = f"{path}.draft"
        (self._root / draft).unlink(missing_ok=True)  # what a crash left, or a link that leads elsewhere
        write_small(self, draft, data)
        self.rename(draft, path)

    def make(self, folder: str) -> None:
        self._at(f"make {folder}")
        (self._root / folder).mkdir(parents=True)
        self._sync_folder(self._root / folder)

    def rename(self, source: str, target: str) -> None:
        self._at(f"rename {source} to {target}")
        os.replace(self._root / source, self._root / target)
        self._at(f"flush the folder of {target}")
        self._sync_folder((self._root / target).parent)

    def remove(self, path: str) -> None:
        self._at(f"remove {path}")
        (self._root / path).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        self._at(f"remove {folder}")
        shutil.rmtree(self._root / folder, ignore_errors=True)

    def free_bytes(self) -> int | None:
        existing = self._root
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        usage = shutil.disk_usage(existing)
        return usage.free if usage.total else None  # /proc and some network file systems count nothing

    @staticmethod
    def _sync_folder(folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _LocalReading:
    request_bytes = 1 << 20
    """Whoever works on what was read finds it in a core's cache."""

    def __init__(self, file: Path) -> None:
        self._name = str(file)
        try:
            self._descriptor = os.open(file, os.O_RDONLY | _CAREFUL)
        except FileNotFoundError:
            raise DamagedError(self._name, "is missing") from None
        except OSError as error:
            linked = error.errno == errno.ELOOP
            problem = "is a link, and links are not followed" if linked else f"cannot be opened: {error.strerror}"
            raise DamagedError(self._name, problem) from None
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            raise DamagedError(self._name, "is no regular file")

    def read_into(self, offset: int, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            count = os.preadv(self._descriptor, [buffer[filled:]], offset + filled)
            if count == 0:
                raise DamagedError(self._name, f"ends at byte {offset + filled}, inside what is read")
            filled += count

    def close(self) -> None:
        os.close(self._descriptor)


class _LocalWriting:
    def __init__(self, file: Path, path: str, at: At) -> None:
        self._stream = file.open("xb", buffering=_BUFFER_BYTES)  # a new file: nothing is overwritten, no link followed
        self._path, self._at = path, at
        self._waiting = 0

    def write(self, data: Buffer) -> None:
        self._at(f"write {self._path}")
        self._waiting += self._stream.write(data)
        if self._waiting >= WRITEBACK_BYTES:
            start_writeback(self._stream.fileno())
            self._waiting = 0

    def finish(self) -> None:
        self._at(f"flush {self._path}")
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()

    def abandon(self) -> None:
        with suppress(OSError):  # a full disk does not take what is still in the buffer
            self._stream.close()
