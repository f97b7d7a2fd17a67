"""Reading pieces out of files along moves: whatever is wanted, from whatever holds it, in constant memory.

    file       |  block 0  |  block 1  |  block 2  |        read once, in order, checked where a digest is known
    stored          [ a stored tensor, row-major ]
    wanted              ####  ####  ####                    a rectangle of it

A block holds a flat range of a stored tensor, that is a few rectangles (`flat_rectangles`); what they share with the
wanted ones is copied to where it belongs, cast and turned on the way (`boxes`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import xxhash
from torch import Tensor

from meshwright.checkpoint.boxes import Part
from meshwright.checkpoint.diagnose import lost_tensors
from meshwright.checkpoint.errors import DamagedError
from meshwright.checkpoint.manifest import BLOCK_BYTES, FileEntry, Manifest
from meshwright.checkpoint.storage import Reading, Storage
from meshwright.checkpoint.views import Held, Views, narrow
from meshwright.layout.moves import Move, Piece, UncoveredError, moves
from meshwright.layout.rectangles import Rectangle, flat_rectangles

__all__ = ["Source", "SourceFile", "Stored", "check_size", "checkpoint_source", "fill", "read_block"]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of `num_bytes`; with digests its blocks are aligned and checked, without them it is read as it comes."""

    path: str
    num_bytes: int
    block_bytes: int = BLOCK_BYTES
    digests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """At byte `offset` of a file a row-major `box` of `dtype` begins; `part` of it is a logical piece."""

    part: Part
    file: int
    offset: int
    dtype: torch.dtype
    box: tuple[int, ...]

    @property
    def piece(self) -> Piece:
        return self.part.piece


@dataclass(frozen=True)
class Source:
    """Files that hold pieces, the storage they lie on, and fingerprints where they are known."""

    storage: Storage
    files: tuple[SourceFile, ...]
    stored: tuple[Stored, ...]
    prints: Mapping[str, int] = field(default_factory=dict)

    def of(self, tensors: Iterable[str]) -> dict[int, tuple[Piece, ...]]:
        """The layout of `tensors`, as `moves` takes it: number in `stored` -> the one piece."""
        return {number: (self.stored[number].piece,) for name in tensors for number in self._numbers.get(name, ())}

    def dtype(self, tensor: str) -> torch.dtype:
        """The type that `tensor` is stored in; raises KeyError where there is no such tensor."""
        return self.stored[self._numbers[tensor][0]].dtype

    @cached_property
    def _numbers(self) -> dict[str, list[int]]:
        numbers: dict[str, list[int]] = defaultdict(list)
        for number, each in enumerate(self.stored):
            numbers[each.piece.tensor].append(number)
        return dict(numbers)


def checkpoint_source(storage: Storage, path: str, manifest: Manifest) -> Source:
    """The files of a checkpoint as a source of its tensors."""
    prefix = f"{path}/" if path else ""
    files = tuple(
        SourceFile(f"{prefix}{file.name}", file.num_bytes, manifest.block_bytes, file.digests)
        for file in manifest.files
    )
    stored = tuple(
        Stored(
            Part.plain(Piece(tensor.name, piece.rectangle)),
            piece.file,
            piece.offset,
            tensor.dtype,
            piece.rectangle.extent,
        )
        for tensor in manifest.tensors
        for piece in tensor.pieces
    )
    return Source(storage, files, stored, {tensor.name: tensor.fingerprint for tensor in manifest.tensors})


@torch.no_grad()
def fill(source: Source, target: Held) -> None:
    """Write every element of `target`, views of pieces of any strides, dtype and device, from `source`.

    Reads only blocks that hold something wanted, each once; extra memory is one block. Raises DamagedError for a block
    whose digest differs, a file of another size or none, and for an element that no file holds.
    """
    views = Views(target)
    try:
        planned = moves(source.of(views.tensors), {"here": tuple(target)})
    except UncoveredError as error:
        raise DamagedError(source.storage.address, str(error)) from None
    by_file: dict[int, list[_Job]] = defaultdict(list)
    for move in planned:
        stored = source.stored[_number(move)]
        landing = views.view(Piece(move.tensor, move.rectangle))
        by_file[stored.file].append(_Job(stored, stored.part.box_of(move.rectangle), landing))
    for number in sorted(by_file):
        _fill_from(source, source.files[number], by_file[number])


@dataclass(frozen=True, slots=True)
class _Job:
    """`wanted`, a rectangle of the box of `stored`, goes to `landing`, a view with the logical axes."""

    stored: Stored
    wanted: Rectangle
    landing: Tensor

    def byte_range(self) -> tuple[int, int]:
        """The bytes of the file from the first wanted element to the last."""
        strides = [math.prod(self.stored.box[dim + 1 :]) for dim in range(len(self.stored.box))]
        first = sum(low * stride for low, stride in zip(self.wanted.start, strides, strict=True))
        last = sum((stop - 1) * stride for stop, stride in zip(self.wanted.stop, strides, strict=True)) + 1
        size = self.stored.dtype.itemsize
        return self.stored.offset + first * size, self.stored.offset + last * size

    def copy(self, block: Tensor, begin: int) -> None:
        """Take what `block` (bytes, uint8), which starts at byte `begin` of the file, has of what is wanted."""
        stored, size = self.stored, self.stored.dtype.itemsize
        first = max(begin - stored.offset, 0) // size
        last = min((begin + block.numel() - stored.offset) // size, math.prod(stored.box))
        for rectangle, flat in flat_rectangles(stored.box, first, last):
            shared = rectangle.intersect(self.wanted)
            if shared is None:
                continue
            where = stored.offset + flat * size - begin
            here = block[where : where + rectangle.numel * size].view(stored.dtype).view(rectangle.extent)
            part = narrow(here, shared.within(rectangle))
            inner = shared.within(self.wanted)
            place = Rectangle(_turned(inner.start, stored.part), _turned(inner.extent, stored.part))
            narrow(self.landing, place).copy_(stored.part.turned(part).reshape(place.extent))


def _turned(dims: tuple[int, ...], part: Part) -> tuple[int, ...]:
    return tuple(dims[axis] for axis in part.permutation)


def _fill_from(source: Source, file: SourceFile, jobs: Sequence[_Job]) -> None:
    reading = source.storage.open(file.path)
    try:
        check_size(source.storage.where(file.path), reading, file)
        buffer = bytearray(min(file.block_bytes, file.num_bytes))
        for (begin, end), users in sorted(_blocks(file, jobs).items(), key=lambda item: item[0]):
            view = memoryview(buffer)[: end - begin]
            if file.digests:
                read_block(source, file, reading, begin // file.block_bytes, view)
            else:
                reading.read_into(begin, view)
            block = torch.frombuffer(buffer, dtype=torch.uint8, count=end - begin)
            for job in users:
                job.copy(block, begin)
    finally:
        reading.close()


def _blocks(file: SourceFile, jobs: Sequence[_Job]) -> dict[tuple[int, int], list[_Job]]:
    """Which bytes are read at once, and who takes something of them."""
    blocks: dict[tuple[int, int], list[_Job]] = defaultdict(list)
    for job in jobs:
        for block in _windows(file, job):
            blocks[block].append(job)
    return blocks


def _windows(file: SourceFile, job: _Job) -> Iterator[tuple[int, int]]:
    """With digests: aligned blocks. Without: runs from the tensor's first byte on, so that no element is torn."""
    first, last = job.byte_range()
    origin = 0 if file.digests else job.stored.offset
    end = file.num_bytes
    for begin in range(origin + (first - origin) // file.block_bytes * file.block_bytes, last, file.block_bytes):
        yield begin, min(begin + file.block_bytes, end)


def read_block(source: Source, file: SourceFile, reading: Reading, number: int, into: memoryview) -> None:
    """Block `number` of `file`. Raises DamagedError with what it holds and both digests."""
    begin = number * file.block_bytes
    reading.read_into(begin, into)
    actual = xxhash.xxh3_128_hexdigest(into)
    if actual != file.digests[number]:
        end = begin + len(into)
        raise DamagedError(
            source.storage.where(file.path),
            f"bytes {begin}..{end - 1} (block {number})",
            tensor=lost_tensors(source, file, begin, end),
            expected=file.digests[number],
            actual=actual,
        )


def check_size(where: str, reading: Reading, file: SourceFile | FileEntry) -> None:
    """Raises DamagedError for a file that is longer or shorter than what was written."""
    if reading.size != file.num_bytes:
        raise DamagedError(where, "bytes in the file", expected=str(file.num_bytes), actual=str(reading.size))


def _number(move: Move) -> int:
    assert isinstance(move.source, int)
    return move.source
