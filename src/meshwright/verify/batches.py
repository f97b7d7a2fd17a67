"""Global batches that make faults of normalisation visible: made up, ragged, and equal on every rank.

    sequence 0     x x x x x x x x        labels that count
    sequence 1     x x x x x . . .        cut at the end: padding
    sequence 2     . . . x x x x x        cut at the front: a prompt
    sequence 3     . . . . . . . .        nothing to train
    sequence 4     x . x x . x x x        holes

A mean of means, a local count or a lost label changes the loss of such a batch; of an even one it changes nothing.
"""

from __future__ import annotations

import numpy as np

from meshwright.config.choices import Documents
from meshwright.data.batch import IGNORED, Batch, local_share
from meshwright.layout.rows import Integers, whole_rows
from meshwright.plan.plan import Plan

__all__ = ["global_batches", "local_share"]

_DOCUMENTS = 3  # documents of a sample, where masks stop at documents


def global_batches(plan: Plan, steps: int) -> tuple[Batch, ...]:
    """The batches of `steps` optimizer steps: tokens of the plan's vocabulary, samples numbered through."""
    return tuple(_batch(plan, step) for step in range(steps))


def _batch(plan: Plan, step: int) -> Batch:
    sequences, length = plan.batch.sequences, plan.data.sequence_length
    random = np.random.default_rng((plan.seed, step))
    tokens = random.integers(0, plan.arch.vocab, (sequences, length + 1), dtype=np.int64)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].copy()
    for row in range(sequences):
        labels[row, ~_trained(random, row, length)] = IGNORED
    samples = step * sequences + np.arange(sequences, dtype=np.int64)
    documents = _documents(random, sequences, length) if plan.data.documents is Documents.MASKED else None
    return Batch(np.ascontiguousarray(inputs), labels, whole_rows(step, samples, length, documents))


def _trained(random: np.random.Generator, row: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """(S,) which labels of a sequence count: by turns all, a head, a tail, none, some."""
    place, cut = np.arange(length), int(random.integers(1, max(length, 2)))
    match row % 5:
        case 0:
            return np.ones(length, dtype=np.bool_)
        case 1:
            return place < cut
        case 2:
            return place >= cut
        case 3:
            return np.zeros(length, dtype=np.bool_)
        case _:
            return random.random(length) < 0.7


def _documents(random: np.random.Generator, sequences: int, length: int) -> Integers:
    """(B, S) document ids, cut at random places."""
    cuts = random.integers(1, max(length, 2), (sequences, _DOCUMENTS - 1))
    places = np.arange(length, dtype=np.int64)
    return np.stack([np.searchsorted(np.sort(row), places, side="right").astype(np.int64) for row in cuts])
