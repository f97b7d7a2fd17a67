"""From what each rank says of its file to one manifest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.checkpoint.manifest import FileEntry, StoredPiece, TensorEntry
from meshwright.checkpoint.subject import Known
from meshwright.checkpoint.writer import PlannedFile
from meshwright.layout.fingerprint import add, shown
from meshwright.layout.rectangles import Rectangle

__all__ = ["part_of_rank", "whole_manifest"]


def part_of_rank(
    file: FileEntry, planned: PlannedFile, prints: Mapping[str, int], updates: int | None
) -> dict[str, Any]:
    """What one writer says: its file, where its pieces lie, and what they add to fingerprints."""
    return {
        "updates": updates,
        "file": {"name": file.name, "bytes": file.num_bytes, "digests": list(file.digests)},
        "pieces": [
            [piece.tensor, entry.offset, list(piece.rectangle.start), list(piece.rectangle.extent)]
            for piece, entry in zip(planned.pieces, planned.contents.entries, strict=True)
        ],
        "prints": {name: shown(value) for name, value in prints.items()},
    }


def whole_manifest(
    known: Known, parts: Sequence[Mapping[str, Any]]
) -> tuple[tuple[FileEntry, ...], tuple[TensorEntry, ...]]:
    """The files of all writers in their order, and every tensor with its pieces and its fingerprint."""
    files: list[FileEntry] = []
    pieces: dict[str, list[StoredPiece]] = defaultdict(list)
    prints: dict[str, int] = defaultdict(int)
    for part in parts:
        if "file" not in part:
            continue
        for tensor, offset, start, extent in part["pieces"]:
            pieces[tensor].append(StoredPiece(len(files), offset, Rectangle(tuple(start), tuple(extent))))
        for tensor, value in part["prints"].items():
            prints[tensor] = add((prints[tensor], int(value, 16)))
        told = part["file"]
        files.append(FileEntry(told["name"], told["bytes"], tuple(told["digests"])))
    tensors = tuple(
        TensorEntry(name, shape, dtype, prints[name], tuple(pieces[name])) for name, (shape, dtype) in known.items()
    )
    return tuple(files), tensors
