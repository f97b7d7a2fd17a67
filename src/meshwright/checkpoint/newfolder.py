"""A folder that appears whole or not at all: what commands write.

out.tmp-9f3a/     files ... manifest    renamed to out/
out/tmp-9f3a/     files ... manifest    where out/ is there already, and empty: it may be where a disk is mounted, and
                                        nothing is renamed over that; its files are, one by one, the manifest last
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.checkpoint.errors import AddressError, CheckpointError
from meshwright.checkpoint.folder import disk_full
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.storage import Local, Storage, open_storage, write_small
from meshwright.config.errors import RequestError

__all__ = ["NewFolder", "new_folder"]


class NewFolder:
    """A folder under way: files go to `path(name)`."""

    def __init__(self, storage: Storage, folder: str, final: str) -> None:
        self.storage, self.folder, self._final = storage, folder, final

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name

    def finish(self, manifest: bytes | None) -> None:
        """Publish it; a checkpoint's manifest comes last."""
        if manifest is not None and self.storage.renames:
            write_small(self.storage, self.path(MANIFEST), manifest)
        elif manifest is not None:
            self.storage.put(self.path(MANIFEST), manifest)
        if self.storage.renames and self._final:
            self.storage.rename(self.folder, self._final)
        elif self.storage.renames:
            for name in sorted(self.storage.names(self.folder), key=lambda name: (name == MANIFEST, name)):
                self.storage.rename(self.path(name), name)
            self.storage.remove_folder(self.folder)


@contextmanager
def new_folder(out: str | Path, needed_bytes: int = 0) -> Iterator[NewFolder]:
    """A new folder at `out`, which must not exist or be empty; it is removed again where its writing fails.

    Raises RequestError where `out` holds something or can be no folder, CheckpointError where fewer than `needed_bytes`
    are free.
    """
    try:
        whole = open_storage(out)
        names = whole.names("")
    except AddressError as error:
        raise RequestError(error.address, error.rule, ("another folder",)) from None
    except OSError as error:
        raise _cannot_be_made(out, error) from None
    if names:
        raise RequestError(str(out), "exists and is not empty; nothing is overwritten", ("another folder",))
    if isinstance(whole, Local):
        _check_can_be_folder(Path(whole.address))
    free = whole.free_bytes()
    if free is not None and free < needed_bytes:
        raise CheckpointError(disk_full(needed_bytes, free, str(out)))
    token = secrets.token_hex(4)
    if whole.renames:
        place = Path(whole.address).absolute()
        if place.is_dir():
            draft = NewFolder(whole, f"tmp-{token}", "")
        else:
            draft = NewFolder(Local(place.parent), f"{place.name}.tmp-{token}", place.name)
        try:
            draft.storage.make(draft.folder)
        except OSError as error:
            raise _cannot_be_made(out, error) from None
    else:
        draft = NewFolder(whole, "", "")  # object by object, the manifest last
    try:
        yield draft
    except BaseException:
        draft.storage.remove_folder(draft.folder)
        raise


def _cannot_be_made(out: str | Path, error: OSError) -> RequestError:
    return RequestError(str(out), f"cannot be made: {error.strerror or error}", ("another folder",))


def _check_can_be_folder(out: Path) -> None:
    """Raise RequestError where something that is no folder stands at `out` or above it."""
    for place in (out, *out.parents):
        if place.is_dir():
            return
        if os.path.lexists(place):
            rule = "is no folder" if place == out else f"{place} is no folder"
            raise RequestError(str(out), rule, ("another folder",))
