"""The manifest of a checkpoint: everything but the numbers themselves.

    {"sha256": "<of the rest>", "manifest": {step, samples, plan, files with block digests, tensors with fingerprints}}

It is written last, so a folder that has one is complete. Every byte of it is fixed or under its digest. What it says
is not trusted: sizes, names and rectangles are checked before a file is opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from meshwright.checkpoint.container import is_plain_name
from meshwright.checkpoint.dtypes import NAMES, name_of
from meshwright.checkpoint.errors import DamagedError
from meshwright.checkpoint.strict import Reader, parse
from meshwright.layout.fingerprint import shown
from meshwright.layout.rectangles import Rectangle, full

__all__ = ["BLOCK_BYTES", "MANIFEST", "FileEntry", "Manifest", "StoredPiece", "TensorEntry", "read_manifest"]

MANIFEST = "manifest.json"
BLOCK_BYTES = 8 << 20
"""A file is checked in blocks of this size, so that whoever reads a part verifies what it reads."""

_FORMAT, _VERSION = "meshwright checkpoint", 2
"""Version 1 had other fingerprints of 64-bit elements."""
_PREFIX = b'{"sha256": "%s", "manifest": '
_SUFFIX = b"}\n"
_MAX_BLOCK_BYTES = 64 << 20
_HEX = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A data file: its size, and the xxh3-128 digest of each block."""

    name: str
    num_bytes: int
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """`rectangle` lies row-major from byte `offset` of file number `file` on."""

    file: int
    offset: int
    rectangle: Rectangle


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A logical tensor: a weight by its name, an optimizer state as "state/name"."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fingerprint: int
    pieces: tuple[StoredPiece, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Manifest:
    """`step` completed optimizer steps, `samples` consumed, `updates` of the weights (fewer where steps were skipped).

    `math` and `layout` are the plan's hashes, `plan` the plan itself as JSON values, `corpus` the digest of the data.
    `extra` holds small state of other parts (a loss scaler), as JSON values.
    """

    step: int
    samples: int
    updates: int
    seed: int
    math: str
    layout: str
    corpus: str
    plan: dict[str, Any]
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    block_bytes: int = BLOCK_BYTES
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of all data files."""
        return sum(file.num_bytes for file in self.files)

    def to_bytes(self) -> bytes:
        """The content of manifest.json."""
        body = json.dumps(_plain(self), separators=(",", ":"), allow_nan=False).encode()
        return _PREFIX % hashlib.sha256(body).hexdigest().encode() + body + _SUFFIX


def read_manifest(data: bytes, file: str) -> Manifest:
    """Parse and check `data`, the content of `file`. Raises DamagedError."""
    head = len(_PREFIX % (b"0" * 64))
    body, told = data[head : -len(_SUFFIX)], data[12 : 12 + 64]
    actual = hashlib.sha256(body).hexdigest().encode()
    if len(data) < head or data[:head] != _PREFIX % told or not data.endswith(_SUFFIX):
        raise DamagedError(file, "is cut off, or no manifest")
    if told != actual:
        raise DamagedError(
            file, "the manifest's sha256", expected=told.decode("ascii", "replace"), actual=actual.decode()
        )
    reader = Reader(parse(body, file), file)
    if reader.text("format") != _FORMAT:
        reader.refuse(f"is no {_FORMAT}")
    if (version := reader.count("version")) != _VERSION:
        reader.refuse(
            f"is of version {version} of the format, and version {_VERSION} is read here: export it with the release "
            "that wrote it, and import that"
        )
    manifest = Manifest(
        step=reader.count("step"),
        samples=reader.count("samples"),
        updates=reader.count("updates"),
        seed=_integer(reader, "seed"),
        math=reader.text("math"),
        layout=reader.text("layout"),
        corpus=reader.text("corpus"),
        plan=reader.object("plan"),
        files=tuple(_file(each) for each in reader.inner("files")),
        tensors=tuple(_tensor(each) for each in reader.inner("tensors")),
        block_bytes=reader.count("block_bytes", _MAX_BLOCK_BYTES),
        extra=reader.object("extra"),
    )
    _check(manifest, reader)
    return manifest


def _plain(manifest: Manifest) -> dict[str, Any]:
    values = {name: getattr(manifest, name) for name in Manifest.__slots__ if name not in ("files", "tensors")}
    files = [{"name": f.name, "bytes": f.num_bytes, "digests": list(f.digests)} for f in manifest.files]
    tensors = [
        {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "dtype": name_of(tensor.dtype),
            "fingerprint": shown(tensor.fingerprint),
            "pieces": [
                [piece.file, piece.offset, list(piece.rectangle.start), list(piece.rectangle.extent)]
                for piece in tensor.pieces
            ],
        }
        for tensor in manifest.tensors
    ]
    return {"format": _FORMAT, "version": _VERSION, **values, "files": files, "tensors": tensors}


def _integer(reader: Reader, key: str) -> int:
    value = reader.keys().get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        reader.refuse(f"has no whole number {key}")
    return value


def _file(reader: Reader) -> FileEntry:
    name, digests = reader.text("name"), reader.texts("digests")
    if not is_plain_name(name):
        reader.refuse(f"names the file {name[:60]!r}: only plain names of .safetensors files are opened")
    if not all(len(each) == 32 and _HEX.fullmatch(each) for each in digests):
        reader.refuse("has a digest that is no 32 hexadecimal digits")
    return FileEntry(name, reader.count("bytes"), digests)


def _tensor(reader: Reader) -> TensorEntry:
    name, shape, dtype = reader.text("name"), reader.counts("shape"), reader.text("dtype")
    fingerprint = reader.text("fingerprint")
    if dtype not in NAMES:
        reader.refuse(f"has unknown dtype {dtype[:20]!r}")
    if len(fingerprint) != 16 or not _HEX.fullmatch(fingerprint):
        reader.refuse("has a fingerprint that is no 16 hexadecimal digits")
    pieces = tuple(_piece(reader, value, len(shape)) for value in reader.values("pieces"))
    return TensorEntry(name, shape, NAMES[dtype], int(fingerprint, 16), pieces)


def _piece(reader: Reader, value: Any, dims: int) -> StoredPiece:
    if not isinstance(value, list) or len(value) != 4:
        reader.refuse("has a piece that is not [file, offset, start, extent]")
    named = dict(zip(("file", "offset", "start", "extent"), value, strict=True))
    inner = reader.nested(named, f"a piece of {reader.text('name')}")
    rectangle = Rectangle(inner.counts("start"), inner.counts("extent"))
    if not len(rectangle.start) == len(rectangle.extent) == dims:
        reader.refuse("has a piece of another number of dimensions")
    return StoredPiece(inner.count("file"), inner.count("offset"), rectangle)


def _check(manifest: Manifest, reader: Reader) -> None:
    """What the parts say of one another: sizes, places, and that pieces make up each tensor exactly once."""
    block = manifest.block_bytes
    if block < 4096 or block & (block - 1):
        reader.refuse(f"has block_bytes = {block}, which is no power of two from 4096 on")
    for names in ([file.name for file in manifest.files], [tensor.name for tensor in manifest.tensors]):
        if len(set(names)) != len(names):
            reader.refuse("names a file or tensor twice")
    for file in manifest.files:
        if len(file.digests) != -(-file.num_bytes // block):
            reader.refuse(f"has {len(file.digests)} digests for the {file.num_bytes} bytes of {file.name}")
    places: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for tensor in manifest.tensors:
        for piece in tensor.pieces:
            size = piece.rectangle.numel * tensor.dtype.itemsize
            if piece.file >= len(manifest.files) or piece.offset + size > manifest.files[piece.file].num_bytes:
                reader.refuse(f"puts a piece of {tensor.name} outside its file")
            if piece.offset % tensor.dtype.itemsize:
                reader.refuse(f"puts a piece of {tensor.name} at byte {piece.offset}, no multiple of its element")
            places[piece.file].append((piece.offset, piece.offset + size, tensor.name))
        if problem := _cover(tensor):
            reader.refuse(f"{problem} of {tensor.name}")
    for within in places.values():
        within.sort()
        for (_, end, one), (start, _, other) in pairwise(within):
            if start < end:
                reader.refuse(f"gives the same bytes to {one} and {other}")


def _cover(tensor: TensorEntry) -> str:
    """What is wrong with the pieces of a tensor; empty where they are disjoint and together all of it."""
    rectangles = [piece.rectangle for piece in tensor.pieces]
    whole = full(tensor.shape)
    if any(not each.numel or each.intersect(whole) != each for each in rectangles):
        return "has an empty piece, or one outside the shape,"
    if any(one.intersect(other) is not None for one, other in _neighbours(rectangles)):
        return "has overlapping pieces"
    if sum(each.numel for each in rectangles) != whole.numel:
        return "lacks elements"
    return ""


def _neighbours(rectangles: Sequence[Rectangle]) -> Iterator[tuple[Rectangle, Rectangle]]:
    """Pairs that share an index of dimension 0."""
    if rectangles and not rectangles[0].start:
        yield from ((rectangles[0], other) for other in rectangles[1:])
        return
    ordered = sorted(rectangles, key=lambda each: each.start)
    starts = [each.start[0] for each in ordered]
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 : bisect_left(starts, one.stop[0])]:
            yield one, other
