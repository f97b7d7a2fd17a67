"""An address that fsspec knows: an object appears whole when it is closed, and nothing is renamed."""

from __future__ import annotations

from typing import Any

from meshwright.checkpoint.errors import AddressError, DamagedError
from meshwright.checkpoint.storage.interface import At, Buffer, Reading, Writing, nothing

__all__ = ["Remote"]


class Remote:
    """Where the manifest, one object, publishes what the others hold."""

    renames = False

    def __init__(self, address: str, at: At = nothing) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise AddressError(address, "is an address: they need fsspec (pip install fsspec)") from None
        self.address = address
        try:
            self._files, root = url_to_fs(address)
        except (ImportError, ValueError) as error:  # a protocol nobody knows, or whose package is not installed
            raise AddressError(address, f"cannot be opened: {error}") from None
        self._root = str(root).rstrip("/")
        self.shared = "memory" not in self._files.protocol  # a name, or several
        self._at = at

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
    def __init__(self, stream: Any, path: str, at: At) -> None:
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
