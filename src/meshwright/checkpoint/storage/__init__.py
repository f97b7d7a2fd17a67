"""Where checkpoints lie: a local folder, or any address that fsspec knows."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint.errors import AddressError
from meshwright.checkpoint.storage.interface import At, Buffer, Reading, Storage, Writing, nothing, write_small
from meshwright.checkpoint.storage.local import Local
from meshwright.checkpoint.storage.remote import Remote

__all__ = ["At", "Buffer", "Local", "Reading", "Remote", "Storage", "Writing", "nothing", "open_storage", "write_small"]


def open_storage(address: str | Path, at: At = nothing) -> Storage:
    """The storage of a folder, or of an fsspec address such as s3://bucket/run. Raises AddressError for what can be
    no address, and where fsspec does not know it."""
    text = str(address).removeprefix("file://")
    if not text.strip():
        raise AddressError(str(address), "is no address: it is empty")
    if "\0" in text:
        raise AddressError(str(address), "is no address: it holds a NUL")
    return Remote(text, at) if "://" in text else Local(Path(text).expanduser(), at)
