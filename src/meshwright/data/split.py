"""A run of samples of the stream: those that train, or those that evaluate."""

from __future__ import annotations

import numpy as np

from meshwright.data.batch import IGNORED, Batch
from meshwright.data.tokens.stream import TokenStream
from meshwright.layout.rows import Integers, whole_rows


class Split:
    """`num_samples` samples from `first_sample` of the stream on."""

    def __init__(
        self, stream: TokenStream, sequence_length: int, first_sample: int, num_samples: int, masks_documents: bool
    ) -> None:
        self._stream = stream
        self._masks_documents = masks_documents
        self.sequence_length = sequence_length
        self.first_sample = first_sample
        self.num_samples = num_samples

    def read(self, ids: Integers, step: int = 0) -> Batch:
        """The samples `ids` (B,), counted within this split; -1 is padding: token 0, no label.

        `rows.sample_ids` count within the whole stream. Raises IndexError for an id outside the split.
        """
        if ids.size and not -1 <= int(ids.min()) <= int(ids.max()) < self.num_samples:
            raise IndexError(f"samples {ids.tolist()} of a split of {self.num_samples}")
        shape = (len(ids), self.sequence_length)
        inputs, labels = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        documents = np.zeros(shape, dtype=np.int64) if self._masks_documents else None
        for row, sample in enumerate(ids.tolist()):
            if sample < 0:
                continue
            first = (self.first_sample + sample) * self.sequence_length
            last = first + self.sequence_length
            tokens = self._stream.read(first, last + 1)
            inputs[row], labels[row] = tokens[:-1], tokens[1:]
            if not self._stream.all_trained:
                labels[row, ~self._stream.trained(first + 1, last + 1)] = IGNORED
            if documents is not None:
                documents[row] = self._stream.document_ids(first, last)
        in_stream = np.where(ids < 0, ids, ids + self.first_sample)
        return Batch(inputs, labels, whole_rows(step, in_stream, self.sequence_length, documents))
