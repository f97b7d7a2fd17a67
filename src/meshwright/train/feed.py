"""What a rank reads: the samples of a step from the one seeded order, and of them this rank's slice only.

order    ... 17 4 88 | 3 9 41 0 | 25 ...         a step takes entries n .. n + G - 1, n = samples consumed
ranks                  0 0  1 1                  contiguous slices by batch coordinate (dp x ep)
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.data import Batch, Dataset, Split, batch_place, evaluation_ids, open_dataset
from meshwright.layout.rows import Integers, part_of
from meshwright.train.job import Job

__all__ = ["Feed", "open_corpus", "rank_feed"]


@dataclass(frozen=True, slots=True)
class Feed:
    """The data as one rank reads it: slice `place` of `ways` of every global batch of `sequences`.

    Before `first_step` other runs consumed `consumed` samples of the same order, in whatever batches.
    """

    dataset: Dataset
    seed: int
    sequences: int
    place: int
    ways: int
    first_step: int = 0
    consumed: int = 0

    def consumed_before(self, step: int) -> int:
        """Samples of the order that were taken before a step."""
        return self.consumed + (step - self.first_step) * self.sequences

    def samples(self, step: int) -> Integers:
        """(G,) training samples of a step, equal on all ranks."""
        return self.dataset.sample_ids(self.seed, self.consumed_before(step), self.sequences)

    def batch(self, step: int) -> Batch:
        """This rank's share of a step."""
        return self._read(self.dataset.train, self.samples(step), step)

    @property
    def evaluation_batches(self) -> int:
        """Global batches of one evaluation; the last one is filled up with padding."""
        return -(-self.dataset.eval.num_samples // self.sequences)

    def evaluation_batch(self, index: int) -> Batch:
        """This rank's share of a global batch of the evaluation, samples in file order."""
        ids = evaluation_ids(self.dataset.eval.num_samples, index * self.sequences, self.sequences)
        return self._read(self.dataset.eval, ids, 0)

    def _read(self, split: Split, ids: Integers, step: int) -> Batch:
        return split.read(ids[part_of(len(ids), self.place, self.ways)], step)


def open_corpus(job: Job) -> Dataset:
    """The job's data, tokenised at most once. Raises RequestError where it cannot be read or does not fit the model."""
    dataset = open_dataset(job.plan.data, job.cache)
    dataset.check_vocabulary(job.plan.arch.vocab)
    return dataset


def rank_feed(job: Job, rank: int) -> Feed:
    """The data of `rank`."""
    plan = job.plan
    return Feed(open_corpus(job), plan.seed, plan.batch.sequences, *batch_place(plan, rank))
