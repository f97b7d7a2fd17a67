"""Rows: which part of the world a rank holds, as index arithmetic.

A model that is cut must still know *where it is*: the rotary angle of a token, the document it may look into, the
random number that drops one of its features. All of these are functions of global indices, so every strategy carries
the same frozen object and only re-indexes it. Rows are derived from the sampler on every rank; nobody sends them.

    B  sequences held          S  tokens held of each sequence          C  degree of the context axis
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)

PADDING_SAMPLE = -1
"""Sample id of a sequence that only fills a batch up to its shape."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Global indices of B sequences of S tokens, all arrays int64 unless stated.

    `positions` and `offsets` differ only where documents are masked: a rotary angle counts from the start of the
    token's own document, whereas a random number must not repeat within a sample. (sample id, offset) is the
    *global token*.
    """

    step: int
    """The optimizer step, from 0."""
    sample_ids: Integers
    """(B,) index of each sequence in the whole stream; -1 for padding."""
    positions: Integers
    """(B, S) index inside the token's own document (within the sample) where documents are masked, else `offsets`."""
    offsets: Integers
    """(B, S) index inside the sample."""
    document_ids: Integers | None = None
    """(B, S) number of the token's document within its sample, from 0; None where all of a sample may be seen."""
    valid: Flags | None = None
    """(B, S) False at padding; None where every token is real."""
    first_feature: int = 0
    """Global index of the first hidden feature held here."""

    @property
    def num_sequences(self) -> int:
        return int(self.offsets.shape[0])

    @property
    def num_tokens(self) -> int:
        """Tokens held of each sequence."""
        return int(self.offsets.shape[1])

    def part(self, index: int, count: int) -> Rows:
        """The `index`-th of `count` equal contiguous runs of sequences. Raises ValueError when B is no multiple."""
        span = part_of(self.num_sequences, index, count)
        return replace(
            self,
            sample_ids=self.sample_ids[span],
            positions=self.positions[span],
            offsets=self.offsets[span],
            document_ids=None if self.document_ids is None else self.document_ids[span],
            valid=None if self.valid is None else self.valid[span],
        )

    def columns(self, index: Integers) -> Rows:
        """The tokens at `index`, (K,) for all sequences alike or (B, K) for each its own; (B, S) -> (B, K)."""
        return replace(
            self,
            positions=take_columns(self.positions, index),
            offsets=take_columns(self.offsets, index),
            document_ids=None if self.document_ids is None else take_columns(self.document_ids, index),
            valid=None if self.valid is None else take_columns(self.valid, index),
        )

    def features(self, first: int) -> Rows:
        """The same tokens, holding hidden features from global index `first` on."""
        return replace(self, first_feature=first)


def whole_rows(step: int, sample_ids: Integers, sequence_length: int, document_ids: Integers | None = None) -> Rows:
    """Rows of whole sequences: sample_ids (B,), document_ids (B, S) or None -> (B, S).

    With document ids, positions start again at each document. Sequences with a negative id are padding.
    """
    offsets = np.tile(np.arange(sequence_length, dtype=np.int64), (len(sample_ids), 1))
    positions = offsets if document_ids is None else offsets - _document_offsets(document_ids)
    padding = sample_ids < 0
    valid = np.repeat(~padding[:, None], sequence_length, axis=1) if padding.any() else None
    return Rows(step, sample_ids, positions, offsets, document_ids, valid)


def part_of(size: int, index: int, count: int) -> slice:
    """The `index`-th of `count` equal contiguous slices of `size` entries.

    Rank groups take theirs with index = batch coordinate over (dp, ep), a rank's micro-batches the same way.
    Raises ValueError where `size` is no multiple of `count` or `index` lies outside [0, count).
    """
    if count < 1 or size % count:
        raise ValueError(f"{size} sequences cannot be cut into {count} equal parts")
    if not 0 <= index < count:
        raise ValueError(f"part {index} of {count} does not exist")
    width = size // count
    return slice(index * width, (index + 1) * width)


def take_columns(values: npt.NDArray[Scalar], index: Integers) -> npt.NDArray[Scalar]:
    """Columns `index`, (K,) or (B, K), of `values` (B, S) -> (B, K)."""
    return values[:, index] if index.ndim == 1 else np.take_along_axis(values, index, axis=1)


def contiguous_columns(length: int, degree: int) -> Integers:
    """(C, S/C): coordinate c holds the c-th run of S/C tokens."""
    if degree < 1 or length % degree:
        raise ValueError(f"{length} tokens cannot be cut into {degree} equal runs")
    return np.arange(length, dtype=np.int64).reshape(degree, length // degree)


def head_tail_columns(length: int, degree: int) -> Integers:
    """(C, S/C): coordinate c holds chunk c and chunk 2C-1-c of 2C equal chunks.

        token      0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15          C = 4
        coordinate  0     1     2     3     3      2       1       0

    Under a causal mask chunk c costs in proportion to its place, so head plus tail is the same work on every
    coordinate (the zig-zag layout of ring attention). Raises ValueError where S is no multiple of 2C.
    """
    if degree < 1 or length % (2 * degree):
        raise ValueError(f"{length} tokens cannot be cut into {2 * degree} equal chunks (two for each context rank)")
    chunks = np.arange(length, dtype=np.int64).reshape(2 * degree, -1)
    return np.concatenate((chunks[:degree], chunks[: degree - 1 : -1]), axis=1)


def head_tail_columns_by_document(document_ids: Integers, degree: int) -> Integers:
    """(C, B, S/C): head and tail chunks of each document, for masks that stop at documents.

    A cut of the whole sequence gives one coordinate the tail of every long document. Here each document is cut into
    2C equal chunks by itself; the fewer than 2C tokens that remain at its end go one by one to coordinates
    0, 1, .., C-1, C-1, .., 1, 0 and again, going on where the document before stopped, so all coordinates hold S/C
    tokens without any padding. Columns ascend within a coordinate. Raises ValueError where S is no multiple of 2C.
    """
    batch, length = document_ids.shape
    if degree < 1 or length % (2 * degree):
        raise ValueError(f"{length} tokens cannot be cut into {2 * degree} equal chunks (two for each context rank)")
    owners = np.stack([_owners_by_document(row, degree) for row in document_ids]) if batch else document_ids
    columns = np.argsort(owners, axis=1, kind="stable").reshape(batch, degree, length // degree)
    return np.ascontiguousarray(columns.transpose(1, 0, 2)).astype(np.int64, copy=False)


def inverse_columns(columns: Integers) -> Integers:
    """Order that undoes a layout (C, S/C): concatenate the coordinates' tokens along S, then take these (S,)."""
    return np.argsort(columns.reshape(-1)).astype(np.int64, copy=False)


def _document_offsets(document_ids: Integers) -> Integers:
    """(B, S) -> (B, S): the column at which each token's document begins."""
    columns = np.broadcast_to(np.arange(document_ids.shape[1], dtype=np.int64), document_ids.shape)
    begins = np.zeros(document_ids.shape, dtype=np.bool_)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return np.maximum.accumulate(np.where(begins, columns, 0), axis=1)


def _owners_by_document(document_ids: Integers, degree: int) -> Integers:
    """(S,) -> (S,): the coordinate that holds each token of one sequence."""
    snake = np.concatenate((np.arange(degree), np.arange(degree)[::-1]))
    owners: list[npt.NDArray[np.intp]] = []
    num_left = 0
    for length in np.diff(np.flatnonzero(np.diff(document_ids, prepend=-1, append=-1))):
        chunk, rest = divmod(int(length), 2 * degree)
        owners += [np.repeat(snake, chunk), snake[(num_left + np.arange(rest)) % (2 * degree)]]
        num_left += rest
    return np.concatenate(owners).astype(np.int64)
