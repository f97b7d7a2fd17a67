"""Where checkpoints lie: a local folder, or any address that fsspec knows. Paths are relative, with "/".

Every step that changes something is announced to `at` first, by name: that is where a test makes a machine crash, a
disk fill up or a writer dawdle.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from meshwright.checkpoint.errors import CheckpointError, DamagedError

__all__ = ["Buffer", "Local", "Reading", "Remote", "Storage", "Writing", "open_storage", "write_small"]

Buffer = bytes | bytearray | memoryview

_CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""No links are followed, and nobody waits for the other end of a pipe."""
_BUFFER_BYTES = 1 << 20
"""Small tensors are written together; larger pieces go past the buffer."""


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


def open_storage(address: str | Path, at: Callable[[str], None] | None = None) -> Storage:
    """The storage of a folder, or of an fsspec address such as s3://bucket/run."""
    text = str(address)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return Remote(text, at) if "://" in text else Local(Path(text).expanduser(), at)


def write_small(storage: Storage, path: str, data: Buffer) -> None:
    """A whole file, flushed; where that fails, whatever was written of it is left behind."""
    writing = storage.create(path)
    try:
        writing.write(data)
        writing.finish()
    except BaseException:
        writing.abandon()
        raise


def _nothing(step: str) -> None:
    """Nobody listens."""


class Local:
    """A folder of this machine or of a shared file system."""

    renames = True

    def __init__(self, root: Path, at: Callable[[str], None] | None = None) -> None:
        self.address = str(root)
        self._root = root
        self._at = at or _nothing

    def where(self, path: str) -> str:
        return str(self._root / path)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self._root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, path: str) -> bytes | None:
        try:
            if not stat.S_ISREG((self._root / path).stat().st_mode):
                return None  # a pipe would keep the reader waiting
            return (self._root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open(self, path: str) -> Reading:
        return _LocalReading(self._root / path)

    def create(self, path: str) -> Writing:
        self._at(f"create {path}")
        return _LocalWriting(self._root / path, path, self._at)

    def put(self, path: str, data: bytes) -> None:
        draft = f"{path}.draft"
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
        return shutil.disk_usage(existing).free

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
            raise DamagedError(self._name, f"cannot be opened ({error.strerror}); links are not followed") from None
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
    def __init__(self, file: Path, path: str, at: Callable[[str], None]) -> None:
        self._stream = file.open("wb", buffering=_BUFFER_BYTES)
        self._path, self._at = path, at

    def write(self, data: Buffer) -> None:
        self._at(f"write {self._path}")
        self._stream.write(data)

    def finish(self) -> None:
        self._at(f"flush {self._path}")
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()

    def abandon(self) -> None:
        with suppress(OSError):  # a full disk does not take what is still in the buffer
            self._stream.close()


class Remote:
    """An fsspec address. An object appears whole when it is closed, and nothing is renamed."""

    renames = False

    def __init__(self, address: str, at: Callable[[str], None] | None = None) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise CheckpointError(f"{address}: addresses need fsspec (pip install fsspec)") from None
        self.address = address
        self._files, root = url_to_fs(address)
        self._root = str(root).rstrip("/")
        self._at = at or _nothing

    def where(self, path: str) -> str:
        return f"{self.address.rstrip('/')}/{path}"

    def names(self, folder: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            listed = self._files.ls(self._path(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted({str(each).rstrip("/").rpartition("/")[2] for each in listed})

    def read(self, path: str) -> bytes | None:
        try:
            return bytes(self._files.cat_file(self._path(path)))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def open(self, path: str) -> Reading:
        return _RemoteReading(self._files, self._path(path), self.where(path))

    def create(self, path: str) -> Writing:
        self._at(f"create {path}")
        return _RemoteWriting(self._files.open(self._path(path), "wb"), path, self._at)

    def put(self, path: str, data: bytes) -> None:
        self._at(f"put {path}")
        self._files.pipe_file(self._path(path), data)

    def make(self, folder: str) -> None:
        self._at(f"make {folder}")
        self._files.makedirs(self._path(folder), exist_ok=True)

    def rename(self, source: str, target: str) -> None:
        raise NotImplementedError("an object store has no rename")

    def remove(self, path: str) -> None:
        self._at(f"remove {path}")
        if self._files.exists(self._path(path)):
            self._files.rm_file(self._path(path))

    def remove_folder(self, folder: str) -> None:
        self._at(f"remove {folder}")
        if self._files.exists(self._path(folder)):
            self._files.rm(self._path(folder), recursive=True)

    def free_bytes(self) -> int | None:
        return None

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


class _RemoteReading:
    request_bytes = 8 << 20
    """A request costs a round trip."""

    def __init__(self, files: Any, path: str, name: str) -> None:
        self._files, self._path, self._name = files, path, name
        try:
            self.size = int(files.info(path)["size"])
        except FileNotFoundError:
            raise DamagedError(name, "is missing") from None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        data = self._files.cat_file(self._path, start=offset, end=offset + len(buffer))
        if len(data) != len(buffer):
            raise DamagedError(self._name, f"ends at byte {offset + len(data)}, inside what is read")
        buffer[:] = data

    def close(self) -> None:
        """Nothing is kept open."""


class _RemoteWriting:
    def __init__(self, stream: Any, path: str, at: Callable[[str], None]) -> None:
        self._stream, self._path, self._at = stream, path, at

    def write(self, data: Buffer) -> None:
        self._at(f"write {self._path}")
        self._stream.write(memoryview(data).cast("B"))

    def finish(self) -> None:
        self._at(f"flush {self._path}")
        self._stream.close()

    def abandon(self) -> None:
        if not self._stream.closed and hasattr(self._stream, "discard"):
            self._stream.discard()
