"""One stream of tokens over memory-mapped shards; nothing of it is held, all its indices are 64-bit.

    shard 0            shard 1                 shard 2
|--d--|----d----|  |---d---|-d-|--d--|  |---------d---------|          d  documents (a shard begins one)
0               first[1]             first[2]            num_tokens
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshwright.layout.rows import Flags, Integers


class DocumentIndex(Protocol):
    """Where the documents of a shard begin."""

    def starts(self, first: int, last: int, tokens: npt.NDArray[np.integer[Any]]) -> Integers:
        """Indices in (first, last) where documents begin, some perhaps twice; `tokens` are those of [first, last)."""


@dataclass(frozen=True, slots=True, eq=False)
class StartsIndex:
    """A stored list of the documents' first tokens, (documents,) int64, ascending, memory-mapped."""

    offsets: Integers

    def starts(self, first: int, last: int, tokens: npt.NDArray[np.integer[Any]]) -> Integers:
        low, high = np.searchsorted(self.offsets, (first + 1, last))
        return self.offsets[low:high]


@dataclass(frozen=True, slots=True)
class EndTokenIndex:
    """Documents told by the token that ends each."""

    end_of_document: int

    def starts(self, first: int, last: int, tokens: npt.NDArray[np.integer[Any]]) -> Integers:
        return first + 1 + np.flatnonzero(tokens[:-1] == self.end_of_document).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Tokens (n,) of one file, which of them are trained (bits, lowest first; None: all), and its documents."""

    tokens: npt.NDArray[np.integer[Any]]
    documents: DocumentIndex | None = None
    trained_bits: npt.NDArray[np.uint8] | None = None

    def trained(self, first: int, last: int) -> Flags:
        if self.trained_bits is None:
            return np.ones(last - first, dtype=np.bool_)
        bits = np.unpackbits(self.trained_bits[first // 8 : last // 8 + 1], bitorder="little")
        return bits[first % 8 :][: last - first].astype(np.bool_)


class TokenStream:
    """The shards' tokens one after another."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = tuple(shards)
        self._firsts = (0, *accumulate(len(shard.tokens) for shard in shards))
        self.num_tokens = self._firsts[-1]
        self.knows_documents = all(shard.documents is not None for shard in shards)
        self.all_trained = all(shard.trained_bits is None for shard in shards)

    def read(self, first: int, last: int) -> Integers:
        """Tokens [first, last), (last - first,) int64."""
        pieces = [shard.tokens[low:high] for shard, low, high, _ in self._spans(first, last)]
        return np.concatenate(pieces).astype(np.int64) if len(pieces) > 1 else pieces[0].astype(np.int64)

    def trained(self, first: int, last: int) -> Flags:
        """Whether each of tokens [first, last) is trained."""
        return np.concatenate([shard.trained(low, high) for shard, low, high, _ in self._spans(first, last)])

    def document_ids(self, first: int, last: int) -> Integers:
        """(last - first,) number of each token's document, from 0 at `first`. Needs `knows_documents`."""
        begins = np.zeros(last - first, dtype=np.int64)
        for shard, low, high, begin in self._spans(first, last):
            assert shard.documents is not None
            begins[begin - first] = begin > first
            begins[shard.documents.starts(low, high, shard.tokens[low:high]) - low + begin - first] = 1
        return np.cumsum(begins)

    def _spans(self, first: int, last: int) -> Iterator[tuple[Shard, int, int, int]]:
        """(shard, its tokens [low, high), index of `low` in the stream) that make up [first, last)."""
        if not 0 <= first < last <= self.num_tokens:
            raise IndexError(f"tokens [{first}, {last}) of a stream of {self.num_tokens}")
        number = bisect_right(self._firsts, first) - 1
        while first < last:
            begin, end = self._firsts[number], self._firsts[number + 1]
            stop = min(last, end)
            if first < stop:
                yield self._shards[number], first - begin, stop - begin, first
            first, number = stop, number + 1
