"""Saving, while training goes on.

    step        | train 59 | copy | train 60 | train 61 | train 62 |
    background             | begin, write, flush ... gather, publish |

The step waits for the copy of what this rank owns to host memory; everything else happens in a thread of its own that
talks to its peers over the side channel. One save is in flight: the next waits for it. Without `asynchronous` the
pieces are written from where they lie, without a copy.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.engine import subject_of
from meshwright.checkpoint.errors import SaveError, os_words
from meshwright.checkpoint.fingerprint import Fingerprints, Signing
from meshwright.checkpoint.folder import Draft, Folder, disk_full
from meshwright.checkpoint.gathered import part_of_rank, whole_manifest
from meshwright.checkpoint.manifest import BLOCK_BYTES, Manifest
from meshwright.checkpoint.subject import Subject
from meshwright.checkpoint.writer import PlannedFile, write_file
from meshwright.comm.agree import Side
from meshwright.comm.views import Views
from meshwright.layout.rectangles import flat_rectangles
from meshwright.parallel.engine import Engine

__all__ = ["Progress", "Saver"]

_MANIFEST_ROOM_BYTES = 1 << 20
_RUN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: completed steps, samples consumed; `extra` is small state of other parts, as JSON values.

    Raises ValueError for what no checkpoint could be read with again.
    """

    step: int
    samples: int
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_count("step", self.step)
        _check_count("samples", self.samples)
        try:
            json.dumps(dict(self.extra), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"extra holds something other than JSON values: {error}") from None


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What is to be saved of one rank: `values` are views, or copies of them, in the order of `planned`."""

    progress: Progress
    updates: int | None
    planned: PlannedFile | None
    values: list[Tensor]


class Saver:
    """Writes checkpoints of an engine, or of another subject, into a run folder.

    Made by all ranks; all call the same methods in one order. `corpus` is the digest of the data, kept beside both
    hashes. `told` hears one line a finished save.
    """

    def __init__(
        self,
        held: Engine | Subject,
        folder: Folder | str | Path,
        *,
        keep: int = 2,
        asynchronous: bool = True,
        corpus: str = "",
        side: Side | None = None,
        block_bytes: int = BLOCK_BYTES,
        told: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._subject = subject_of(held)
        self._folder = folder if isinstance(folder, Folder) else Folder(folder)
        self._keep, self._asynchronous, self._corpus = keep, asynchronous, corpus
        self._block_bytes, self._told = block_bytes, told
        self._side = side or Side()
        self._owns_side = side is None
        self._thread: threading.Thread | None = None
        self._failure: SaveError | None = None
        self._buffers: list[Tensor] = []
        self.blocked_seconds = 0.0
        """How long `save` kept the last step waiting."""

    def save(self, progress: Progress) -> None:
        """Save the state as it is now. Collective.

        Asynchronous: returns when it is copied; the outcome comes with the next `save` or `wait`. Raises SaveError,
        on all ranks alike, for this save or the one before; the run may go on.
        """
        begin = time.perf_counter()
        self.wait()
        views, planned = Views(self._subject.views()), self._subject.planned()
        values = [views.view(piece) for piece in planned.pieces] if planned is not None else []
        progress = replace(progress, extra={**progress.extra, **self._subject.extra()})
        if self._asynchronous:
            values = self._copied(values)
        snapshot = _Snapshot(progress, self._subject.updates(), planned, values)
        if self._asynchronous:
            self._thread = threading.Thread(target=self._in_background, args=(snapshot,), name="save")
            self._thread.start()
        else:
            self._write(snapshot)
        self.blocked_seconds = time.perf_counter() - begin

    def wait(self) -> None:
        """Return when nothing is in flight. Raises SaveError where the last save failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Wait, and leave the side channel. Collective."""
        try:
            self.wait()
        finally:
            self._buffers = []
            if self._owns_side:
                self._side.close()

    # ------------------------------------------------------------------ inside

    def _copied(self, values: list[Tensor]) -> list[Tensor]:
        """Copies in host memory, kept from save to save: page-locked where they come from a device. A module's
        optimizer makes its states in its first step, which may come after the first save."""
        if [(b.shape, b.dtype) for b in self._buffers] != [(v.shape, v.dtype) for v in values]:
            self._buffers = [torch.empty(v.shape, dtype=v.dtype, pin_memory=v.is_cuda) for v in values]
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value, non_blocking=True)
        if any(value.is_cuda for value in values):
            torch.cuda.synchronize()
        return self._buffers

    def _in_background(self, snapshot: _Snapshot) -> None:
        try:
            self._write(snapshot)
        except SaveError as error:
            self._failure = error

    def _write(self, snapshot: _Snapshot) -> None:
        """`_agreed` for a user: whatever goes wrong is a SaveError."""
        step = snapshot.progress.step
        try:
            self._agreed(snapshot)
        except SaveError as error:
            raise SaveError(f"step {step} was not saved: {error}") from None
        except RuntimeError as error:  # what ranks do alone raises nothing: the side channel broke
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise SaveError(f"step {step} was not saved: another rank is gone: {reason}") from error

    def _agreed(self, snapshot: _Snapshot) -> None:
        """What all ranks do together: begin, write, gather, publish. Whatever fails anywhere fails everywhere."""
        begin = time.perf_counter()
        draft, problem = None, ""
        if self._side.rank == 0:
            draft, problem = self._begun(snapshot.progress.step)
        said = json.loads(self._side.broadcast(json.dumps([draft and draft.token, problem]).encode()))
        if said[1]:
            raise SaveError(said[1])
        draft = draft or Draft(snapshot.progress.step, said[0], self._folder.storage.renames)
        parts = self._side.gather(self._written(draft, snapshot))
        if self._side.rank == 0:
            problem = self._published(draft, snapshot.progress, [json.loads(part) for part in parts])
        problem = self._side.broadcast(problem.encode()).decode()
        if problem:
            raise SaveError(problem)
        self._told(f"saved {self._folder.storage.where(draft.final)} in {time.perf_counter() - begin:.1f} s")

    def _begun(self, step: int) -> tuple[Draft | None, str]:
        try:
            return self._folder.begin(step, self._subject.num_bytes + _MANIFEST_ROOM_BYTES), ""
        except Exception as error:
            return None, _in_words(error, self._folder, self._subject.num_bytes)

    def _written(self, draft: Draft, snapshot: _Snapshot) -> bytes:
        """Write this rank's file; what it has to say of it, or what went wrong, as JSON."""
        planned, values, updates = snapshot.planned, snapshot.values, snapshot.updates
        if planned is None:
            return json.dumps({"updates": updates}).encode()
        name = draft.data_name(self._side.rank)
        writing = None
        try:
            writing = self._folder.storage.create(draft.path(name))
            prints = Fingerprints()
            file = write_file(writing, planned, _signed(planned, values, prints), name, self._block_bytes)
            return json.dumps(part_of_rank(file, planned, prints.sums, updates)).encode()
        except Exception as error:
            problem = _in_words(error, self._folder, self._subject.num_bytes)
            return json.dumps({"problem": f"rank {self._side.rank}: {problem}"}).encode()
        finally:
            if writing is not None:
                writing.abandon()

    def _published(self, draft: Draft, progress: Progress, parts: list[dict[str, Any]]) -> str:
        """Rank 0: "" when the checkpoint stands, else why not; then nothing of it is left."""
        problem = next((part["problem"] for part in parts if "problem" in part), "")
        if not problem:
            try:
                self._folder.publish(draft, self._manifest(progress, parts), self._keep)
            except Exception as error:
                problem = _in_words(error, self._folder, self._subject.num_bytes)
        if problem:
            with suppress(OSError):  # a disk that answers nothing; the next start cleans up
                self._folder.discard(draft)
        return str(problem)

    def _manifest(self, progress: Progress, parts: list[dict[str, Any]]) -> Manifest:
        identity = self._subject.identity
        files, tensors = whole_manifest(self._subject.known, parts)
        return Manifest(
            step=progress.step,
            samples=progress.samples,
            updates=next((part["updates"] for part in parts if part["updates"] is not None), progress.step),
            seed=identity.seed,
            math=identity.math,
            layout=identity.layout,
            corpus=self._corpus,
            plan=dict(identity.plan),
            files=files,
            tensors=tensors,
            block_bytes=self._block_bytes,
            extra=dict(progress.extra),
        )


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} = {value!r}: wanted is an int from 0 on")


def _signed(planned: PlannedFile, values: list[Tensor], prints: Fingerprints) -> Iterator[Tensor]:
    """The values in runs of whole lines, each signed once it is written: it is in a core's cache then."""
    for piece, value in zip(planned.pieces, values, strict=True):
        if not Signing.can(value):
            prints.take(piece, value)
            yield value
            continue
        extent, numel = piece.rectangle.extent, value.numel()
        line = numel // extent[0] if extent else 1
        run = max(_RUN_BYTES // (line * value.element_size()), 1) * line
        signing, flat = Signing(piece.rectangle, value), value.reshape(-1)
        for first in range(0, numel, run):
            last = min(first + run, numel)
            yield flat[first:last]
            for inner, _ in flat_rectangles(extent, first, last):
                signing.took(inner)
        prints.add(piece.tensor, signing.value())


def _in_words(error: Exception, folder: Folder, needed_bytes: int) -> str:
    """What a user can act on; a full disk is told with both numbers."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        storage = folder.storage
        free = storage.free_bytes() or 0
        told = disk_full(needed_bytes, free, storage.where("checkpoints"))
        return f"{told}; what ran out is inodes or a quota" if free > needed_bytes else told
    if isinstance(error, OSError):
        return os_words(error, folder.storage.address)
    return f"{error}" if isinstance(error, (SaveError, RuntimeError)) else f"{type(error).__name__}: {error}"
