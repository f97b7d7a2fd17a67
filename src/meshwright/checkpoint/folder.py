"""The folder of a run's checkpoints, and the order in which it changes.

    runs/demo/latest                            "checkpoints/step-00000060"
    runs/demo/checkpoints/step-00000060/        manifest.json   data-00000.safetensors   data-00001.safetensors
    runs/demo/checkpoints/step-00000080.tmp-k/  a save under way, or what a crash left of one

    1  write everything into a temporary folder, each file flushed
    2  the manifest last, flushed                     a folder without one is not complete
    3  rename the folder                              readers see all of it or nothing
    4  replace `latest`                               a hint: what is complete is found without it
    5  remove the oldest: renamed, its manifest first  a folder half removed is not complete, and removed at a start

Where nothing can be renamed (object stores) the files go straight to their place under names of their own, and the
manifest, one object, publishes them. Nothing is ever overwritten in place.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from meshwright.checkpoint.errors import AddressError, CheckpointError, DamagedError
from meshwright.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from meshwright.checkpoint.storage import At, Local, Storage, nothing, open_storage, write_small
from meshwright.config.errors import RequestError

__all__ = [
    "CHECKPOINTS",
    "LATEST",
    "Draft",
    "Folder",
    "data_name",
    "disk_full",
    "find_checkpoint",
    "load_manifest",
    "step_name",
    "step_of",
]

CHECKPOINTS = "checkpoints"
LATEST = "latest"
_STEP = re.compile(r"step-(\d{8,18})")
_LEFT = re.compile(r"(step-\d{8,18})\.(tmp|old)-[0-9a-f]+")


def step_name(step: int) -> str:
    """The folder of the checkpoint after `step` completed steps."""
    return f"step-{step:08d}"


def step_of(path: str) -> int:
    """The step in the name of a checkpoint's folder; -1 where it is none."""
    match = _STEP.fullmatch(path.rpartition("/")[2])
    return int(match[1]) if match else -1


def data_name(rank: int, infix: str = "") -> str:
    """The file of what `rank` owns."""
    return f"data{infix}-{rank:05d}.safetensors"


class Draft:
    """A checkpoint that is being written: files go to `path(name)`, and nobody sees them before `Folder.publish`."""

    def __init__(self, step: int, token: str, renames: bool) -> None:
        self.step, self.token = step, token
        self.final = f"{CHECKPOINTS}/{step_name(step)}"
        self.folder = f"{self.final}.tmp-{token}" if renames else self.final
        self._infix = "" if renames else f"-{token}"

    def data_name(self, rank: int) -> str:
        """The name of a rank's data file."""
        return data_name(rank, self._infix)

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"


class Folder:
    """A run folder or address, seen as the place of its checkpoints. One process, rank 0, changes it."""

    def __init__(self, address: str | Path, at: At = nothing) -> None:
        self.storage: Storage = open_storage(address, at)

    def steps(self) -> list[int]:
        """Steps of complete checkpoints (those with a manifest), the newest first."""
        return sorted((int(match[1]) for match in self._matches(_STEP) if self._has_manifest(match[0])), reverse=True)

    def incomplete(self) -> list[str]:
        """Names of step folders without a manifest."""
        return [match[0] for match in self._matches(_STEP) if not self._has_manifest(match[0])]

    def path(self, step: int) -> str:
        return f"{CHECKPOINTS}/{step_name(step)}"

    def manifest(self, step: int) -> Manifest:
        """Raises DamagedError."""
        return load_manifest(self.storage, self.path(step))

    # ------------------------------------------------------------------ a save

    def begin(self, step: int, needed_bytes: int, token: str | None = None) -> Draft:
        """Make room for a checkpoint. Raises CheckpointError, with nothing written yet, where the disk is too full."""
        free = self.storage.free_bytes()
        if free is not None and free < needed_bytes:
            raise CheckpointError(disk_full(needed_bytes, free, self.storage.where(CHECKPOINTS)))
        draft = Draft(step, token or secrets.token_hex(4), self.storage.renames)
        self.storage.make(draft.folder)
        return draft

    def publish(self, draft: Draft, manifest: Manifest, keep: int) -> None:
        """Make a draft whose data files are flushed the newest checkpoint; keep as many as `keep`."""
        if self.storage.renames:
            write_small(self.storage, draft.path(MANIFEST), manifest.to_bytes())
            self._replace(draft)
        else:
            self.storage.put(draft.path(MANIFEST), manifest.to_bytes())
        self.storage.put(LATEST, f"{draft.final}\n".encode())
        self._prune(draft, manifest, keep)

    def discard(self, draft: Draft) -> None:
        """Remove what a failed save has written."""
        if self.storage.renames:
            self.storage.remove_folder(draft.folder)
            return
        for name in self.storage.names(draft.folder):
            if f"-{draft.token}-" in name:
                self.storage.remove(draft.path(name))

    def _replace(self, draft: Draft) -> None:
        """Rename into place. A folder of the same step steps aside first; `clean` puts it back after a crash."""
        aside = f"{draft.final}.old-{draft.token}"
        exists = bool(self.storage.names(draft.final))
        if exists:
            self.storage.rename(draft.final, aside)
        self.storage.rename(draft.folder, draft.final)
        if exists:
            self._remove(aside)

    def _prune(self, draft: Draft, manifest: Manifest, keep: int) -> None:
        """The one just written stays, and the `keep - 1` before it. Later steps are a future that was given up."""
        others = [step for step in self.steps() if step != draft.step]
        later = [step for step in others if step > draft.step]
        earlier = [step for step in others if step < draft.step]
        for step in (*later, *earlier[max(keep - 1, 0) :]):
            self._remove(self._given_up(step))
        if not self.storage.renames:
            wanted = {MANIFEST, *(file.name for file in manifest.files)}
            for name in set(self.storage.names(draft.final)) - wanted:
                self.storage.remove(draft.path(name))

    def _given_up(self, step: int) -> str:
        """A checkpoint under a name that `clean` removes, should its removal not come to its end."""
        path = self.path(step)
        if not self.storage.renames:
            return path
        aside = f"{path}.tmp-{secrets.token_hex(4)}"
        self.storage.rename(path, aside)
        return aside

    def _remove(self, path: str) -> None:
        self.storage.remove(f"{path}/{MANIFEST}")
        self.storage.remove_folder(path)

    # ------------------------------------------------------------------ a start

    def clean(self) -> list[str]:
        """Remove what crashes left behind, and put back what had stepped aside; returns a line for each."""
        told = []
        for match in list(self._matches(_LEFT)):
            name, target = f"{CHECKPOINTS}/{match[0]}", f"{CHECKPOINTS}/{match[1]}"
            if match[2] == "old" and not self._has_manifest(match[1]) and self._has_manifest(match[0]):
                self.storage.remove_folder(target)
                self.storage.rename(name, target)
                told.append(f"put back {self.storage.where(target)}")
            else:
                self._remove(name)
                told.append(f"removed {self.storage.where(name)}, left by a save that did not end")
        for name in () if self.storage.renames else self._cut():
            self.storage.remove_folder(f"{CHECKPOINTS}/{name}")
            told.append(f"removed {self.storage.where(f'{CHECKPOINTS}/{name}')}, which has no manifest")
        if self.storage.read(f"{LATEST}.draft") is not None:
            self.storage.remove(f"{LATEST}.draft")
        return told

    def _cut(self) -> list[str]:
        """Names of step folders that a save or a removal left when it was cut; none where that cannot be known.

        `latest` is written after the manifest: the folder it names was whole, and has lost its manifest since.
        """
        try:
            latest = self.latest()
        except DamagedError:
            return []
        if not self.steps():
            return []  # where nothing is complete all stays, to be told of
        return [name for name in self.incomplete() if f"{CHECKPOINTS}/{name}" != latest]

    def set_aside(self) -> str | None:
        """For a run that starts afresh on purpose: move all checkpoints out of its way. Returns where, None if none."""
        if not self.storage.names(CHECKPOINTS):
            return None
        if not self.storage.renames:
            where = self.storage.where(CHECKPOINTS)
            rule = "holds checkpoints, and nothing there can be moved aside"
            raise RequestError(where, rule, ("another name", "checkpoint.resume=auto"))
        self.storage.remove(LATEST)  # first: checkpoints without it are found, it without checkpoints is an error
        taken = set(self.storage.names(""))
        number = next(n for n in range(1, 1 << 30) if f"{CHECKPOINTS}.before-{n}" not in taken)
        target = f"{CHECKPOINTS}.before-{number}"
        self.storage.rename(CHECKPOINTS, target)
        return self.storage.where(target)

    def latest(self) -> str | None:
        """What `latest` names, None where there is none. Raises DamagedError where it names no checkpoint folder."""
        data = self.storage.read(LATEST)
        if data is None:
            return None
        text = data.decode("utf-8", "replace").strip()
        folder, _, name = text.rpartition("/")
        if folder != CHECKPOINTS or not _STEP.fullmatch(name):
            raise DamagedError(self.storage.where(LATEST), f"names {text[:60]!r}, which is no checkpoint of this run")
        return text

    def _matches(self, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
        for name in self.storage.names(CHECKPOINTS):
            match = pattern.fullmatch(name)
            if match is not None:
                yield match

    def _has_manifest(self, name: str) -> bool:
        return MANIFEST in self.storage.names(f"{CHECKPOINTS}/{name}")


def load_manifest(storage: Storage, path: str) -> Manifest:
    """The manifest of the checkpoint at `path` of `storage`. Raises DamagedError."""
    where = f"{path}/{MANIFEST}" if path else MANIFEST
    data = storage.read(where)
    if data is None:
        raise DamagedError(storage.where(where), "is missing: the checkpoint is not complete")
    manifest = read_manifest(data, storage.where(where))
    if step_of(path) not in (-1, manifest.step):
        raise DamagedError(storage.where(where), f"is of step {manifest.step}, in the folder of another step")
    return manifest


def find_checkpoint(address: str | Path) -> tuple[Storage, str]:
    """The storage and path of one checkpoint: a step folder itself, a `latest` file, or a run folder (its newest).

    Raises AddressError where there is none.
    """
    storage = open_storage(address)
    try:
        names = storage.names("")
    except OSError as error:
        raise AddressError(str(address), f"cannot be read: {error.strerror or error}") from None
    if MANIFEST in names:
        return storage, ""
    run, name = _above(storage)
    folder = Folder(run if name in (LATEST, CHECKPOINTS) else address)
    steps = folder.steps()
    if not steps:
        raise AddressError(str(address), f"is no checkpoint: {_why_none(storage)}")
    named = folder.latest() if name == LATEST else None
    return folder.storage, named or folder.path(steps[0])


def _above(storage: Storage) -> tuple[str, str]:
    """The folder in which the root of a storage lies, and the root's name in it; no name where it is the outermost."""
    if isinstance(storage, Local):
        place = Path(storage.address)
        return str(place.parent), place.name
    above, _, name = storage.address.rstrip("/").rpartition("/")
    return (above, name) if not above.endswith(":/") else (storage.address, "")


def _why_none(storage: Storage) -> str:
    if isinstance(storage, Local) and not Path(storage.address).is_dir():
        return "it is a file; name its folder" if Path(storage.address).exists() else "there is no such folder"
    return f"it holds neither a {MANIFEST} nor {CHECKPOINTS}/step-..."


def disk_full(needed: int, free: int, where: str) -> str:
    return f"disk full: a checkpoint needs {needed:,} bytes, {free:,} are free at {where}"
