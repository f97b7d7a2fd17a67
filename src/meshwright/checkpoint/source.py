"""Reading pieces out of files along moves: whatever is wanted, from whatever holds it, in constant memory.

file       |  block 0  |  block 1  |  block 2  |        read once, in order, checked where a digest is known
requests    . . . . . . . . . . . . . . . . . .         a MiB: hashed and copied while it is in a core's cache
stored          [ a stored tensor, row-major ]
wanted              ####  ####  ####                    a rectangle of it (`landing`)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import xxhash
from torch import Tensor

from meshwright.checkpoint.boxes import Part
from meshwright.checkpoint.diagnose import lost_tensors, reached_tensors
from meshwright.checkpoint.errors import DamagedError
from meshwright.checkpoint.landing import Landed, Landing, nobody
from meshwright.checkpoint.manifest import BLOCK_BYTES, Manifest
from meshwright.checkpoint.storage import Reading, Storage
from meshwright.comm.views import Held, Views
from meshwright.layout.moves import Move, Piece, UncoveredError, moves

__all__ = ["Source", "SourceFile", "Stored", "checkpoint_source", "fill", "open_file", "read_block"]

_LEAST_SHARE = 8
"""A part of a request that is smaller than one in so many is not worth a request of its own."""


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
def fill(source: Source, target: Held, watch: Callable[[Piece, Tensor], Landed] = lambda piece, view: nobody) -> None:
    """Write every element of `target`, views of pieces of any strides, dtype and device, from `source`.

    Reads only blocks that hold something wanted, each once; extra memory is one request. `watch` says of each part that
    is to be moved, in indices of the tensor, and of its view, who hears of what has come. Raises DamagedError for a
    block whose digest differs, a file of another size or none, and for an element that no file holds; what `target`
    holds then is undefined.
    """
    views = Views(target)
    try:
        planned = moves(source.of(views.tensors), {"here": tuple(target)})
    except UncoveredError as error:
        raise DamagedError(source.storage.address, str(error)) from None
    by_file: dict[int, list[Landing]] = defaultdict(list)
    for move in planned:
        stored, piece = source.stored[_number(move)], Piece(move.tensor, move.rectangle)
        view = views.view(piece)
        by_file[stored.file].append(Landing.of(stored, move.rectangle, view, watch(piece, view)))
    for number in sorted(by_file):
        _fill_from(source, source.files[number], by_file[number])


def _fill_from(source: Source, file: SourceFile, landings: Sequence[Landing]) -> None:
    reading = open_file(source, file)
    try:
        scratch = bytearray(min(reading.request_bytes, file.block_bytes, file.num_bytes))
        for (begin, end), users in sorted(_blocks(file, landings).items(), key=lambda item: item[0]):
            digest = xxhash.xxh3_128()
            for data in _taken(reading, begin, end, users, scratch):
                if file.digests:
                    digest.update(data)
            if file.digests:
                _check_digest(source, file, begin, end, digest.hexdigest())
    finally:
        reading.close()


def _taken(
    reading: Reading, begin: int, end: int, landings: Sequence[Landing], scratch: bytearray
) -> Iterator[memoryview]:
    """Bytes [begin, end) of the file, request by request, once they are where somebody wants them: those that lie in
    memory as they do in the file are read into it, the others by way of `scratch`."""
    found = (landing.within(begin, end) for landing in landings)
    straight = [each for each in found if each is not None and len(each.memory) * _LEAST_SHARE >= len(scratch)]
    for each in sorted(straight, key=lambda each: each.begin):
        yield from _copied(reading, begin, each.begin, landings, scratch)
        for low, memory in each.requests(len(scratch)):
            reading.read_into(low, memory)
            yield memory
            each.landing.came(low, low + len(memory))
        begin = each.end
    yield from _copied(reading, begin, end, landings, scratch)


def _copied(
    reading: Reading, begin: int, end: int, landings: Sequence[Landing], scratch: bytearray
) -> Iterator[memoryview]:
    """Bytes [begin, end) by way of `scratch`."""
    for low in range(begin, end, len(scratch)):
        data = memoryview(scratch)[: min(end - low, len(scratch))]
        reading.read_into(low, data)
        block = torch.frombuffer(scratch, dtype=torch.uint8, count=len(data))
        for landing in landings:
            landing.copy(block, low)
        yield data


def _blocks(file: SourceFile, landings: Sequence[Landing]) -> dict[tuple[int, int], list[Landing]]:
    """Which bytes are verified at once, and who takes something of them."""
    blocks: dict[tuple[int, int], list[Landing]] = defaultdict(list)
    for landing in landings:
        for block in _windows(file, landing):
            blocks[block].append(landing)
    return blocks


def _windows(file: SourceFile, landing: Landing) -> Iterator[tuple[int, int]]:
    """With digests: aligned blocks. Without: runs from the tensor's first byte on, so that no element is torn."""
    origin = 0 if file.digests else landing.stored.offset
    end = file.num_bytes
    start = origin + (landing.begin - origin) // file.block_bytes * file.block_bytes
    for begin in range(start, landing.end, file.block_bytes):
        yield begin, min(begin + file.block_bytes, end)


def read_block(source: Source, file: SourceFile, reading: Reading, number: int, into: memoryview) -> None:
    """Block `number` of `file`. Raises DamagedError with what it holds and both digests."""
    begin = number * file.block_bytes
    reading.read_into(begin, into)
    _check_digest(source, file, begin, begin + len(into), xxhash.xxh3_128_hexdigest(into))


def _check_digest(source: Source, file: SourceFile, begin: int, end: int, actual: str) -> None:
    number = begin // file.block_bytes
    if actual != file.digests[number]:
        raise DamagedError(
            source.storage.where(file.path),
            f"bytes {begin}..{end - 1} (block {number})",
            tensor=lost_tensors(source, file, begin, end),
            expected=file.digests[number],
            actual=actual,
        )


def open_file(source: Source, file: SourceFile) -> Reading:
    """`file`, of the size that was written. Raises DamagedError, with the tensors that are not there, for a file that
    cannot be opened, is longer or is shorter."""
    try:
        reading = source.storage.open(file.path)
    except DamagedError as error:
        raise DamagedError(error.file, error.problem, tensor=reached_tensors(source, file)) from None
    try:
        _check_size(source, file, reading)
    except DamagedError:
        reading.close()
        raise
    return reading


def _check_size(source: Source, file: SourceFile, reading: Reading) -> None:
    """Of a file that was cut, the first block that is not whole is told as a changed one is: with both digests."""
    where, size = source.storage.where(file.path), reading.size
    if size == file.num_bytes:
        return
    if size > file.num_bytes or not file.digests:
        gone = reached_tensors(source, file, size) if size < file.num_bytes else ""
        raise DamagedError(where, "bytes in the file", tensor=gone, expected=str(file.num_bytes), actual=str(size))
    number = size // file.block_bytes
    begin = number * file.block_bytes
    left = bytearray(size - begin)
    reading.read_into(begin, memoryview(left))
    end = min(begin + file.block_bytes, file.num_bytes)
    raise DamagedError(
        where,
        f"{size} bytes in the file, of {file.num_bytes}: bytes {begin}..{end - 1} (block {number})",
        tensor=reached_tensors(source, file, size),
        expected=file.digests[number],
        actual=xxhash.xxh3_128_hexdigest(left),
    )


def _number(move: Move) -> int:
    assert isinstance(move.source, int)
    return move.source
