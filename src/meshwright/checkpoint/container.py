"""The safetensors file format, written in one pass and read by parts.

    8 bytes   length n of the header, little endian
    n bytes   JSON: name -> {"dtype", "shape", "data_offsets"}, padded with spaces
    rest      the tensors, one after the other without gaps

Entries are ordered by the size of an element, largest first, so that every tensor starts at a multiple of it.
(github.com/huggingface/safetensors, "Format".)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from meshwright.checkpoint.dtypes import CODES, code_of
from meshwright.checkpoint.errors import DamagedError
from meshwright.checkpoint.storage import Reading
from meshwright.checkpoint.strict import Reader, parse

__all__ = ["ALIGN", "Contents", "Entry", "is_plain_name", "plan_container", "read_container"]

ALIGN = 64
"""The data begins at a multiple of this many bytes."""
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""


_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: `offset` in bytes from the start of the file, row-major."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Contents:
    """A planned file: its first bytes, then `entries` in order; `order[i]` is the asked place of entry i."""

    header: bytes
    entries: tuple[Entry, ...]
    order: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.entries[-1].offset + self.entries[-1].num_bytes if self.entries else len(self.header)


def plan_container(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> Contents:
    """Where each of `tensors` (unique name, dtype, shape) will lie."""
    order = sorted(range(len(tensors)), key=lambda number: -tensors[number][1].itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    first, places = 0, []
    for number in order:
        name, dtype, shape = tensors[number]
        last = first + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": code_of(dtype), "shape": list(shape), "data_offsets": [first, last]}
        places.append(first)
        first = last
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError(f"{len(tensors)} tensors need a header of {len(text)} bytes; the format ends at 100 MB")
    begin = 8 + len(text)
    entries = tuple(Entry(*tensors[number], begin + place) for number, place in zip(order, places, strict=True))
    return Contents(len(text).to_bytes(8, "little") + text, entries, tuple(order))


def is_plain_name(name: str) -> bool:
    """Whether an untrusted file may name `name`: a safetensors file of its own folder, and nothing else."""
    return _PLAIN_NAME.fullmatch(name) is not None and ".." not in name


def read_container(reading: Reading, file: str) -> tuple[Entry, ...]:
    """The entries of `file`, opened as `reading`.

    Raises DamagedError for a header that does not fit the file: length, syntax, names given twice, unknown types,
    sizes that contradict shapes, gaps and overlaps.
    """
    size = reading.size
    if size < 8:
        raise DamagedError(file, f"has {size} bytes, too few for a safetensors file")
    length = int.from_bytes(_bytes(reading, 0, 8), "little")
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise DamagedError(file, f"says its header has {length} bytes, in a file of {size}")
    values = parse(_bytes(reading, 8, length), file)
    head = Reader(values, file, "the header").keys()
    entries = [
        _entry(Reader(value, file, f"the header's {name!r}"), name, 8 + length)
        for name, value in head.items()
        if name != "__metadata__"
    ]
    entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))
    end = 8 + length
    for entry in entries:
        if entry.offset != end:
            raise DamagedError(file, f"leaves a gap or overlaps before byte {entry.offset}", tensor=entry.name)
        end += entry.num_bytes
    if end != size:
        raise DamagedError(file, f"has {size} bytes where its header describes {end}")
    return tuple(entries)


def _bytes(reading: Reading, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    reading.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def _entry(reader: Reader, name: str, begin: int) -> Entry:
    code, shape, offsets = reader.text("dtype"), reader.counts("shape"), reader.counts("data_offsets")
    if code not in CODES:
        reader.refuse(f"has unknown type {code[:20]}")
    if len(offsets) != 2:
        reader.refuse("has no pair of data_offsets")
    entry = Entry(name, CODES[code], shape, begin + offsets[0])
    if offsets[1] - offsets[0] != entry.num_bytes:
        reader.refuse(f"has {offsets[1] - offsets[0]} bytes for shape {list(shape)} of {code}")
    return entry
