"""Batches of a stream: inputs, shifted labels, masks, documents, padding, parts."""

import numpy as np
import pytest

from meshwright.data.batch import IGNORED, Batch, evaluation_ids
from meshwright.data.split import Split
from meshwright.data.tokens.stream import EndTokenIndex, Shard, StartsIndex, TokenStream
from meshwright.layout.rows import head_tail_columns


def counting(num_tokens: int) -> TokenStream:
    return TokenStream([Shard(np.arange(num_tokens, dtype=np.uint32))])


def test_sample_i_reads_s_plus_one_tokens_from_i_times_s() -> None:
    split = Split(counting(41), 8, 0, 5, masks_documents=False)
    batch = split.read(np.array([3, 0]), step=6)
    assert batch.inputs.tolist() == [list(range(24, 32)), list(range(8))]
    assert batch.labels.tolist() == [list(range(25, 33)), list(range(1, 9))]
    assert batch.inputs.dtype == batch.labels.dtype == np.int64
    assert batch.rows.step == 6
    assert batch.rows.sample_ids.tolist() == [3, 0]
    assert batch.rows.positions.tolist() == [list(range(8))] * 2
    assert batch.rows.document_ids is None
    assert batch.trained_tokens == 16


def test_each_token_is_a_label_once_and_splits_share_none() -> None:
    stream = counting(41)
    train, evaluation = Split(stream, 8, 0, 3, False), Split(stream, 8, 3, 2, False)
    trained = train.read(np.arange(3)).labels.reshape(-1).tolist()
    evaluated = evaluation.read(np.arange(2)).labels.reshape(-1).tolist()
    assert trained + evaluated == list(range(1, 41))
    assert evaluation.read(np.array([1])).rows.sample_ids.tolist() == [4]


def test_masked_labels_are_ignored() -> None:
    flags = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1], dtype=np.uint8)
    stream = TokenStream([Shard(np.arange(11), trained_bits=np.packbits(flags, bitorder="little"))])
    labels = Split(stream, 5, 0, 2, False).read(np.arange(2)).labels
    i = IGNORED
    assert labels.tolist() == [[i, 2, 3, 4, i], [i, 7, 8, i, 10]]


def test_a_sample_without_a_trained_token_is_all_ignored() -> None:
    """B02 (OLMo-core#657) begins here: such rows must exist and count nothing."""
    stream = TokenStream([Shard(np.arange(9), trained_bits=np.zeros(2, dtype=np.uint8))])
    batch = Split(stream, 8, 0, 1, False).read(np.array([0]))
    assert batch.trained_tokens == 0
    assert batch.rows.valid is None  # read, though not trained


def test_masked_documents_are_numbered_and_counted_from_their_start() -> None:
    """B41 (TransformerEngine#2077): positions inside the document; one cut by the sample's edge starts at 0."""
    tokens = np.array([1, 1, 9, 2, 2, 2, 9, 3, 3, 3, 3, 9, 4])
    for documents in (EndTokenIndex(9), StartsIndex(np.array([0, 3, 7, 12]))):
        rows = Split(TokenStream([Shard(tokens, documents)]), 6, 0, 2, True).read(np.arange(2)).rows
        assert rows.document_ids is not None
        assert rows.document_ids.tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]]
        assert rows.positions.tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 4]]
        assert rows.offsets.tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_parts_and_micro_batches_make_up_the_batch() -> None:
    """B81 (accelerate#3092): what a rank reads is decided by its batch coordinate alone."""
    batch = Split(counting(129), 8, 0, 16, False).read(np.arange(12))
    seen: list[int] = []
    for coordinate in range(2):
        part = batch.part(coordinate, 2)
        for number in range(3):
            micro = part.micro(number, 3)
            assert micro.inputs.tolist() == (micro.rows.sample_ids[:, None] * 8 + np.arange(8)).tolist()
            seen += micro.rows.sample_ids.tolist()
    assert seen == list(range(12))


def test_fingerprints_tell_batches_apart() -> None:
    split = Split(counting(129), 8, 0, 16, False)
    first = split.read(np.array([0, 1, 2, 3]))
    assert first.part(0, 2).fingerprint() == split.read(np.array([0, 1])).fingerprint()
    others = [split.read(np.array(ids)) for ids in ([1, 0], [0, 2], [0, 1, 2])]
    assert len({batch.fingerprint() for batch in [first.part(0, 2), *others]}) == 4
    assert 0 <= first.fingerprint() < 2**63


def test_columns_keep_shifted_labels() -> None:
    """B11 (transformers#36607): no shard loses the target of its last token."""
    batch = Split(counting(17), 16, 0, 1, False).read(np.array([0]))
    held: list[Batch] = [batch.columns(columns) for columns in head_tail_columns(16, 4)]
    assert held[0].inputs.tolist() == [[0, 1, 14, 15]]
    assert all((part.labels == part.inputs + 1).all() for part in held)
    assert all((part.rows.positions == part.inputs).all() for part in held)


def test_the_last_evaluation_batch_is_filled_with_padding() -> None:
    split = Split(counting(41), 8, 0, 5, masks_documents=False)
    ids = evaluation_ids(split.num_samples, 4, 3)
    assert ids.tolist() == [4, -1, -1]
    batch = split.read(ids)
    assert batch.trained_tokens == 8
    assert batch.labels[1:].tolist() == [[IGNORED] * 8] * 2
    assert batch.rows.valid is not None
    assert batch.rows.valid.tolist() == [[True] * 8, [False] * 8, [False] * 8]
    assert evaluation_ids(5, 0, 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("ids", [[5], [-2], [0, 7]])
def test_samples_outside_the_split_are_refused(ids: list[int]) -> None:
    with pytest.raises(IndexError):
        Split(counting(41), 8, 0, 5, False).read(np.array(ids))
