"""One data file of a checkpoint: what it will hold as data, then its bytes in one pass with their digests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from meshwright.checkpoint.container import Contents, plan_container
from meshwright.checkpoint.manifest import FileEntry
from meshwright.checkpoint.storage import Buffer, Writing
from meshwright.checkpoint.views import bytes_of
from meshwright.comm.views import narrow
from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import flat_rectangles

__all__ = ["Digests", "PlannedFile", "chunks_of", "plan_file", "write_file"]

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """The pieces of a file in the order in which they lie, and where."""

    pieces: tuple[Piece, ...]
    contents: Contents

    @property
    def num_bytes(self) -> int:
        return self.contents.num_bytes

    def dtype(self, number: int) -> torch.dtype:
        return self.contents.entries[number].dtype


def plan_file(pieces: Sequence[tuple[Piece, torch.dtype]]) -> PlannedFile:
    """The file that holds `pieces`, each with its type. An entry is called "tensor[first:last,..]"."""
    contents = plan_container([(_key(piece), dtype, piece.rectangle.extent) for piece, dtype in pieces])
    return PlannedFile(tuple(pieces[number][0] for number in contents.order), contents)


def write_file(writing: Writing, planned: PlannedFile, values: Iterable[Tensor], name: str, block: int) -> FileEntry:
    """Write the pieces in order and flush. `values`: for each piece views that make it up, flattened in order.

    Extra memory: a chunk of at most 8 MiB where a view is not contiguous in host memory.
    """
    digests = Digests(block)
    digests.update(planned.contents.header)
    writing.write(planned.contents.header)
    for value in values:
        for chunk in chunks_of(value):
            data = bytes_of(chunk)
            digests.update(data)
            writing.write(data)
    writing.finish()
    entry = FileEntry(name, digests.num_bytes, digests.finish())
    if entry.num_bytes != planned.num_bytes:
        raise AssertionError(f"{name} has {entry.num_bytes} bytes, planned were {planned.num_bytes}")
    return entry


class Digests:
    """xxh3-128 of every block of a stream of bytes."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._current = xxhash.xxh3_128()
        self._done: list[str] = []
        self.num_bytes = 0

    def update(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while view:
            room = self._block_bytes - self.num_bytes % self._block_bytes
            part, view = view[:room], view[room:]
            self._current.update(part)
            self.num_bytes += len(part)
            if self.num_bytes % self._block_bytes == 0:
                self._done.append(self._current.hexdigest())
                self._current = xxhash.xxh3_128()

    def finish(self) -> tuple[str, ...]:
        """One digest a block, the last of what there is of it."""
        rest = (self._current.hexdigest(),) if self.num_bytes % self._block_bytes else ()
        return (*self._done, *rest)


def chunks_of(value: Tensor) -> Iterator[Tensor]:
    """`value` (any strides and device) as contiguous flat runs in host memory, in row-major order, without a copy where
    it is one already."""
    limit = max(_CHUNK_BYTES // value.element_size(), 1)
    if value.is_contiguous():
        flat = value.reshape(-1)
        for first in range(0, flat.numel(), limit):
            yield flat[first : first + limit].cpu()
        return
    shape = tuple(value.shape)
    for first in range(0, value.numel(), limit):
        for rectangle, _ in flat_rectangles(shape, first, min(first + limit, value.numel())):
            yield narrow(value, rectangle).contiguous().reshape(-1).cpu()


def _key(piece: Piece) -> str:
    rectangle = piece.rectangle
    ranges = (f"{first}:{last}" for first, last in zip(rectangle.start, rectangle.stop, strict=True))
    return f"{piece.tensor}[{','.join(ranges)}]"
