"""Index arithmetic of rows: every layout of the sequence holds each token once and keeps its place in the world."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.layout.rows import (
    Rows,
    contiguous_columns,
    head_tail_columns,
    head_tail_columns_by_document,
    inverse_columns,
    part_of,
    take_columns,
    whole_rows,
)


def documents(*lengths: int) -> np.ndarray:
    """(1, S) document ids of documents of these lengths."""
    return np.repeat(np.arange(len(lengths)), lengths)[None].astype(np.int64)


def held_by(rows: Rows, columns: np.ndarray) -> list[Rows]:
    return [rows.columns(index) for index in columns]


def test_parts_are_contiguous_and_cover_all_sequences() -> None:
    rows = whole_rows(3, np.arange(100, 112), 4)
    parts = [rows.part(index, 3) for index in range(3)]
    assert [list(part.sample_ids) for part in parts] == [
        [100, 101, 102, 103],
        [104, 105, 106, 107],
        [108, 109, 110, 111],
    ]
    assert all(part.step == 3 and part.num_sequences == 4 and part.num_tokens == 4 for part in parts)
    micro = parts[1].part(1, 4)
    assert list(micro.sample_ids) == [105]


@pytest.mark.parametrize(("size", "index", "count"), [(5, 0, 2), (4, 2, 2), (4, -1, 2), (4, 0, 0)])
def test_a_part_that_cannot_be_is_refused(size: int, index: int, count: int) -> None:
    with pytest.raises(ValueError):
        part_of(size, index, count)


def test_labels_keep_their_targets_under_head_tail() -> None:
    """B11 (huggingface/transformers#36607): shift first, then split; 15 of 16 tokens have a label, on any layout."""
    tokens = np.arange(16)[None]
    labels = np.append(np.arange(1, 16), -100)[None]
    columns = head_tail_columns(16, 4)
    assert [list(take_columns(tokens, c)[0]) for c in columns] == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]
    assert [list(take_columns(labels, c)[0]) for c in columns] == [
        [1, 2, 15, -100],
        [3, 4, 13, 14],
        [5, 6, 11, 12],
        [7, 8, 9, 10],
    ]
    assert sum(int((take_columns(labels, c) != -100).sum()) for c in columns) == 15


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_positions_count_inside_the_document_on_every_layout(degree: int) -> None:
    """B41 (NVIDIA/TransformerEngine#2077): documents of 5 and 11 tokens, no padding needed."""
    ids = documents(5, 11)
    rows = whole_rows(0, np.array([7]), 16, ids)
    own = np.concatenate((np.arange(5), np.arange(11)))
    assert list(rows.positions[0]) == list(own)
    by_document = head_tail_columns_by_document(ids, degree)[:, 0]
    for columns in (contiguous_columns(16, degree), head_tail_columns(16, degree), by_document):
        for index, held in zip(columns, held_by(rows, columns), strict=True):
            assert list(held.positions[0]) == list(own[index])
            assert list(held.offsets[0]) == list(index)
            assert list(held.document_ids[0]) == list(ids[0][index])


def test_causal_work_is_balanced_inside_documents() -> None:
    """B43 (pytorch/pytorch#189902): documents of 4 and 12 tokens on two ranks are 44 query-key pairs each."""
    ids = documents(4, 12)
    rows = whole_rows(0, np.array([0]), 16, ids)
    work = [int((rows.columns(index).positions + 1).sum()) for index in head_tail_columns_by_document(ids, 2)]
    assert work == [44, 44]
    # the zig-zag of the whole sequence is right but uneven: what the layout by document is for
    assert [int((held.positions + 1).sum()) for held in held_by(rows, head_tail_columns(16, 2))] == [52, 36]


def test_causal_work_is_balanced_without_documents() -> None:
    rows = whole_rows(0, np.array([0]), 64, None)
    work = [int((held.positions + 1).sum()) for held in held_by(rows, head_tail_columns(64, 8))]
    assert set(work) == {64 * 65 // 2 // 8}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from([1, 2, 3, 4]))
def test_layouts_are_bijections_with_equal_shares(lengths: list[int], degree: int) -> None:
    lengths.append(-sum(lengths) % (2 * degree) + 2 * degree)
    ids = documents(*lengths)
    length = ids.shape[1]
    layouts = [contiguous_columns(length, degree), head_tail_columns(length, degree)]
    layouts.append(head_tail_columns_by_document(ids, degree)[:, 0])
    tokens = np.arange(length)
    for columns in layouts:
        assert columns.shape == (degree, length // degree)
        assert columns.dtype == np.int64
        assert list(tokens[columns].reshape(-1)[inverse_columns(columns)]) == list(tokens)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.sampled_from([2, 4, 8]))
def test_work_by_document_is_near_even(lengths: list[int], degree: int) -> None:
    """Equal but for the leftovers: fewer than 2C tokens a document, each at most its document's length of work."""
    lengths.append(-sum(lengths) % (2 * degree) + 2 * degree)
    ids = documents(*lengths)
    held = held_by(whole_rows(0, np.array([0]), sum(lengths), ids), head_tail_columns_by_document(ids, degree))
    work = [int((rows.positions + 1).sum()) for rows in held]
    assert max(work) - min(work) <= 2 * sum(lengths)


def test_sequences_of_a_batch_may_have_layouts_of_their_own() -> None:
    ids = np.concatenate((documents(4, 12), documents(8, 8)))
    columns = head_tail_columns_by_document(ids, 2)
    assert columns.shape == (2, 2, 8)
    held = whole_rows(0, np.array([0, 1]), 16, ids).columns(columns[0])
    assert list(held.offsets[0]) == [0, 3, 4, 5, 6, 13, 14, 15]
    assert list(held.offsets[1]) == [0, 1, 6, 7, 8, 9, 14, 15]


def test_padding_is_marked_and_survives_slicing() -> None:
    rows = whole_rows(0, np.array([4, -1]), 8)
    assert rows.valid is not None
    assert rows.valid.tolist() == [[True] * 8, [False] * 8]
    assert rows.part(1, 2).columns(np.array([0, 7])).valid.tolist() == [[False, False]]
    assert whole_rows(0, np.array([4, 5]), 8).valid is None


def test_features_change_nothing_else() -> None:
    rows = whole_rows(5, np.array([4]), 8)
    assert rows.first_feature == 0
    moved = rows.features(64)
    assert moved.first_feature == 64
    assert moved.offsets is rows.offsets
    assert moved.step == 5


@pytest.mark.parametrize(("length", "degree"), [(18, 4), (16, 0), (4, 4)])
def test_a_sequence_that_cannot_be_cut_is_refused(length: int, degree: int) -> None:
    with pytest.raises(ValueError):
        head_tail_columns(length, degree)
    with pytest.raises(ValueError):
        head_tail_columns_by_document(documents(length), degree)
