"""Batches: what a forward pass is given, still in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from meshwright.layout.groups import GroupName, groups
from meshwright.layout.rows import PADDING_SAMPLE, Integers, Rows, part_of, take_columns, whole_rows
from meshwright.plan.plan import Plan

IGNORED = -100
"""The label of a token that is not trained."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B sequences of S tokens. Labels are shifted already: they may be cut along S anywhere."""

    inputs: Integers
    """(B, S) tokens, int64."""
    labels: Integers
    """(B, S) the token that follows each, int64; -100 where it is not trained."""
    rows: Rows

    @classmethod
    def of_tokens(cls, tokens: Integers, step: int = 0) -> Batch:
        """Whole sequences (B, S + 1) of one step: inputs are the first S tokens, labels the last S, all trained.

        `step` numbers the samples through, which decides what dropout draws.
        """
        samples = step * len(tokens) + np.arange(len(tokens), dtype=np.int64)
        inputs, labels = (np.ascontiguousarray(part, dtype=np.int64) for part in (tokens[:, :-1], tokens[:, 1:]))
        return cls(inputs, labels, whole_rows(step, samples, inputs.shape[1], None))

    @property
    def num_sequences(self) -> int:
        return int(self.inputs.shape[0])

    @property
    def trained_tokens(self) -> int:
        """Labels that count."""
        return int(np.count_nonzero(self.labels != IGNORED))

    def fingerprint(self) -> int:
        """63 bits of the tokens, labels and sample ids: equal on all ranks that must read the same samples."""
        digest = xxhash.xxh3_64()
        for array in (self.inputs, self.labels, self.rows.sample_ids):
            digest.update(np.ascontiguousarray(array).data)
        return digest.intdigest() >> 1

    def part(self, index: int, count: int) -> Batch:
        """The sequences of one of `count` ranks of the batch group: equal contiguous runs, by batch coordinate."""
        span = part_of(self.num_sequences, index, count)
        return Batch(self.inputs[span], self.labels[span], self.rows.part(index, count))

    def micro(self, index: int, count: int) -> Batch:
        """The `index`-th of this rank's `count` micro-batches; cut as `part` cuts."""
        return self.part(index, count)

    def columns(self, index: Integers) -> Batch:
        """Tokens `index` of each sequence, (K,) or (B, K): one coordinate's share of the context axis."""
        return Batch(take_columns(self.inputs, index), take_columns(self.labels, index), self.rows.columns(index))


def local_share(plan: Plan, batch: Batch, rank: int) -> Batch:
    """What the rank group of `rank` reads of a global batch: a contiguous slice by its batch coordinate."""
    return batch.part(*batch_place(plan, rank))


def batch_place(plan: Plan, rank: int) -> tuple[int, int]:
    """(place, ways): which of how many shares of a batch the rank group of `rank` reads, by its place on dp x ep."""
    group = groups(plan.degrees)[GroupName.BATCH]
    return group.place(plan.degrees, plan.degrees.coordinates(rank)), group.size


def evaluation_ids(num_samples: int, start: int, count: int) -> Integers:
    """(count,) ids start, start + 1, .. of a split in order, filled up with -1 (padding) past its end.

    So that every rank sees the same shape in the last batch of an evaluation.
    """
    ids = start + np.arange(count, dtype=np.int64)
    return np.where(ids < num_samples, ids, PADDING_SAMPLE)
