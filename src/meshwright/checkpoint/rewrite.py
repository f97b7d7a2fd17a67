"""Checkpoints out of any source without an engine: another layout offline, or imported weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.checkpoint.beside import beside_of, recorded, write_beside
from meshwright.checkpoint.errors import CheckpointError
from meshwright.checkpoint.fingerprint import Fingerprints, check_fingerprint
from meshwright.checkpoint.fits import check_fits
from meshwright.checkpoint.folder import data_name, load_manifest
from meshwright.checkpoint.gathered import part_of_rank, whole_manifest
from meshwright.checkpoint.manifest import BLOCK_BYTES, MANIFEST, Manifest
from meshwright.checkpoint.newfolder import new_folder
from meshwright.checkpoint.plans import plan_to_json
from meshwright.checkpoint.source import Source, checkpoint_source
from meshwright.checkpoint.state import planned_files, shapes, total_bytes
from meshwright.checkpoint.storage import Storage
from meshwright.checkpoint.stream import Box, stream
from meshwright.checkpoint.writer import PlannedFile, plan_file, write_file
from meshwright.layout.moves import Piece
from meshwright.plan.plan import Plan

__all__ = ["reshard", "write_checkpoint"]


def reshard(storage: Storage, path: str, out: str | Path, plan: Plan) -> Manifest:
    """Write the checkpoint at `path` of `storage` anew at `out` for the layout of `plan`, in constant memory.

    Every byte that is read is checked, every fingerprint compared. `plan` must train the same as the saved one. Raises
    DamagedError, CheckpointError where the tensors are not those of `plan`, RequestError where `out` is taken.
    """
    saved = load_manifest(storage, path)
    if saved.math != plan.math:
        raise CheckpointError(f"{storage.where(path)}: a new layout may not change what is trained")
    check_fits(saved, shapes(plan), storage.where(path))
    names = {tensor.name for tensor in saved.tensors}
    written = write_checkpoint(
        checkpoint_source(storage, path, saved),
        out,
        plan,
        lambda name: name in names,
        step=saved.step,
        samples=saved.samples,
        updates=saved.updates,
        corpus=saved.corpus,
        block_bytes=saved.block_bytes,
        extra=saved.extra,
        beside=beside_of(storage, path, saved),
    )
    before = {tensor.name: tensor.fingerprint for tensor in saved.tensors}
    for tensor in written.tensors:
        # cannot differ, where digests agree; it is what all this is for
        check_fingerprint(f"{out}/{MANIFEST}", tensor.name, before[tensor.name], tensor.fingerprint)
    return written


def write_checkpoint(
    source: Source,
    out: str | Path,
    plan: Plan,
    has: Callable[[str], bool],
    *,
    step: int = 0,
    samples: int = 0,
    updates: int = 0,
    corpus: str = "",
    block_bytes: int = BLOCK_BYTES,
    extra: Mapping[str, Any] | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> Manifest:
    """One checkpoint folder at `out`, for the layout of `plan`, of those tensors that the source `has`; with the small
    files `beside` it."""
    with new_folder(out, total_bytes(plan)) as draft:
        write_beside(draft.storage, draft.folder, beside or {})
        parts = []
        for rank, planned in planned_files(plan).items():
            kept = [(p, planned.dtype(n)) for n, p in enumerate(planned.pieces) if has(p.tensor)]
            if not kept:
                continue
            file = plan_file(kept)
            prints = Fingerprints()
            name = data_name(rank)
            writing = draft.storage.create(draft.path(name))
            try:
                entry = write_file(writing, file, _values(source, file, prints), name, block_bytes)
            finally:
                writing.abandon()
            parts.append(part_of_rank(entry, file, prints.sums, updates))
        files, tensors = whole_manifest(shapes(plan), parts)
        manifest = Manifest(
            step=step,
            samples=samples,
            updates=updates,
            seed=plan.seed,
            math=plan.math,
            layout=plan.layout,
            corpus=corpus,
            plan=plan_to_json(plan),
            files=files,
            tensors=tuple(tensor for tensor in tensors if has(tensor.name)),
            block_bytes=block_bytes,
            extra={**(extra or {}), **recorded(beside or {})},
        )
        draft.finish(manifest.to_bytes())
    return manifest


def _values(source: Source, file: PlannedFile, prints: Fingerprints) -> Iterator[Tensor]:
    """The values of a file in order; `prints` takes each."""
    boxes = [Box.plain(piece, file.dtype(number)) for number, piece in enumerate(file.pieces)]
    for filled in stream(source, boxes):
        piece = file.pieces[filled.box]
        prints.take(Piece(piece.tensor, filled.rectangle.offset_by(piece.rectangle.start)), filled.values)
        yield filled.values
