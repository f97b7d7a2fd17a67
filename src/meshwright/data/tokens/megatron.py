"""Megatron-LM's indexed dataset: tokens in .bin, sequences and documents in .idx (its `indexed_dataset.py`).

.idx  "MMIDIDX\\0\\0" | version 1, u64 | type, u8 | sequences n, u64 | documents m, u64
      | lengths i32[n] | byte offsets i64[n] | first sequence of each document i64[m], the last being n | [modes]
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.config.errors import RequestError
from meshwright.layout.rows import Integers

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_CHECKED_SEQUENCES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class MegatronIndex:
    """Documents of a .bin file, memory-mapped."""

    offsets_bytes: Integers
    """(sequences,) first byte of each sequence, ascending."""
    first_sequences: Integers
    """(documents + 1,) first sequence of each document, and the number of sequences."""
    token_bytes: int

    @property
    def num_documents(self) -> int:
        return len(self.first_sequences) - 1

    def starts(self, first: int, last: int, tokens: npt.NDArray[np.integer[Any]]) -> Integers:
        """Tokens in (first, last) at which documents begin; one without tokens begins where the next does.

        By `bisect`, since the arrays lie unaligned behind their header and numpy's search would copy them whole.
        """
        edges = [edge * self.token_bytes for edge in (first + 1, last)]
        sequences = [bisect_left(self.offsets_bytes, edge) for edge in edges]
        low, high = (bisect_left(self.first_sequences, sequence, hi=self.num_documents) for sequence in sequences)
        return self.offsets_bytes[self.first_sequences[low:high]] // self.token_bytes


def open_megatron(bin_file: Path, idx_file: Path) -> tuple[npt.NDArray[np.integer[Any]], MegatronIndex]:
    """Tokens (n,) and documents, both mapped. Raises RequestError where the two files do not belong together."""
    with idx_file.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise RequestError(str(idx_file), "is no MMIDIDX index", ["without .idx the .bin is read as raw tokens"])
    _, version, code, num_sequences, num_starts = _HEADER.unpack(header)
    if version != 1 or code not in _TYPES:
        raise RequestError(str(idx_file), f"has version {version} and type {code}", ["version 1 with integer tokens"])
    if idx_file.stat().st_size < _HEADER.size + 12 * num_sequences + 8 * num_starts or not num_sequences:
        raise RequestError(str(idx_file), f"is cut off or empty: {num_sequences} sequences, {num_starts - 1} documents")
    lengths, offsets, first_sequences = _arrays(idx_file, num_sequences, num_starts)
    dtype = _TYPES[code]
    num_tokens = _check_contiguous(idx_file, lengths, offsets, dtype.itemsize)
    if bin_file.stat().st_size != num_tokens * dtype.itemsize or not num_tokens:
        rule = f"has {bin_file.stat().st_size} bytes, its index tells {num_tokens} tokens of {dtype.itemsize} bytes"
        raise RequestError(str(bin_file), rule)
    if num_starts < 2 or first_sequences[0] != 0 or first_sequences[-1] != num_sequences:
        raise RequestError(str(idx_file), "documents do not cover all sequences")
    _check_ascending(idx_file, first_sequences)
    tokens = np.memmap(bin_file, dtype=dtype, mode="r").view(np.ndarray)
    return tokens, MegatronIndex(offsets, first_sequences, dtype.itemsize)


def _arrays(idx_file: Path, num_sequences: int, num_starts: int) -> tuple[npt.NDArray[np.int32], Integers, Integers]:
    raw = np.memmap(idx_file, dtype=np.uint8, mode="r", offset=_HEADER.size).view(np.ndarray)
    ends = 4 * num_sequences, 12 * num_sequences, 12 * num_sequences + 8 * num_starts
    return raw[: ends[0]].view("<i4"), raw[ends[0] : ends[1]].view("<i8"), raw[ends[1] : ends[2]].view("<i8")


def _check_contiguous(idx_file: Path, lengths: npt.NDArray[np.int32], offsets: Integers, token_bytes: int) -> int:
    """The number of tokens, once each sequence is seen to begin where the one before ends."""
    end = 0
    for first in range(0, len(lengths), _CHECKED_SEQUENCES):
        sizes = lengths[first : first + _CHECKED_SEQUENCES].astype(np.int64) * token_bytes
        begins = offsets[first : first + _CHECKED_SEQUENCES]
        expected = end + np.cumsum(sizes) - sizes
        wrong = np.flatnonzero((begins != expected) | (sizes < 0))
        if wrong.size:
            sequence = first + int(wrong[0])
            raise RequestError(str(idx_file), f"sequence {sequence} does not begin where the one before it ends")
        end = int(expected[-1] + sizes[-1])
    return end // token_bytes


def _check_ascending(idx_file: Path, first_sequences: Integers) -> None:
    for first in range(0, len(first_sequences) - 1, _CHECKED_SEQUENCES):
        begins = first_sequences[first : first + _CHECKED_SEQUENCES + 1]
        wrong = np.flatnonzero(begins[1:] < begins[:-1])
        if wrong.size:
            document = first + int(wrong[0]) + 1
            raise RequestError(str(idx_file), f"document {document} begins before the one before it")
