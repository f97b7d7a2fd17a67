"""Rectangles of blocks against the mask, drawn token by token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.layout.blocks import Block, Meeting, Sees, block_of, blocks, flat
from meshwright.layout.rows import (
    Integers,
    Rows,
    contiguous_columns,
    head_tail_columns,
    head_tail_columns_by_document,
    whole_rows,
)

Flags = npt.NDArray[np.bool_]
LENGTH = 24


def documents(cuts: list[int]) -> Integers:
    """(LENGTH,) ids of documents that end before these places."""
    return np.searchsorted(np.sort(cuts), np.arange(LENGTH), side="right").astype(np.int64)


def rows_of(cuts: list[list[int]] | None, padding: int = 0, sequences: int = 2) -> Rows:
    ids = np.arange(sequences, dtype=np.int64)
    ids[sequences - padding :] = -1
    return whole_rows(0, ids, LENGTH, None if cuts is None else np.stack([documents(each) for each in cuts]))


def meeting_of(rows: Rows, columns: Integers, own: int, fixed: bool = False) -> Meeting:
    keys = np.concatenate(list(columns), axis=-1)
    return Meeting(rows.columns(columns[own]), rows.columns(keys), len(columns), own, fixed)


def mask_of(meeting: Meeting, window: int) -> Flags:
    """(B, Q, Z), one pair after the other."""
    queries, keys = meeting.queries, meeting.keys
    out = np.zeros((queries.num_sequences, queries.num_tokens, keys.num_tokens), dtype=np.bool_)
    for row, one, other in np.ndindex(*out.shape):
        back = queries.offsets[row, one] - keys.offsets[row, other]
        alike = queries.document_ids is None or queries.document_ids[row, one] == keys.document_ids[row, other]  # type: ignore[index]
        real = keys.valid is None or keys.valid[row, other]
        out[row, one, other] = back >= 0 and (not window or back < window) and alike and (real or back == 0)
    return out


def painted(block: Block, mask: Flags) -> Flags:
    """What a kernel lets the queries see of a block whose part of the mask is `mask` (B, Q, Z)."""
    out = np.zeros_like(mask)
    inside = (slice(None), slice(*block.queries), slice(*block.keys))
    match block.sees:
        case Sees.ALL:
            out[inside] = True
        case Sees.CAUSAL:
            out[inside] = np.tri(*out[inside].shape[1:], dtype=np.bool_)
        case Sees.MASKED:
            out[inside] = mask[inside]
        case Sees.NOTHING:
            pass
    return out


def check(meeting: Meeting, window: int) -> tuple[Block, ...]:
    mask, found = mask_of(meeting, window), blocks(meeting, window)
    for block, part in zip(found, np.split(mask, meeting.ways, axis=2), strict=True):
        assert (painted(block, part) == part).all(), block
        if block.sees is not Sees.NOTHING and meeting.queries.valid is None:
            inside = part[:, slice(*block.queries), slice(*block.keys)]
            edges = (inside[:, 0], inside[:, -1], inside[..., 0], inside[..., -1])
            assert all(edge.any() for edge in edges), f"{block} has an edge that nobody sees"
    return found


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.one_of(st.none(), st.lists(st.lists(st.integers(1, LENGTH - 1), max_size=4), min_size=2, max_size=2)),
    ways=st.sampled_from([1, 2, 3, 4]), padding=st.sampled_from([0, 0, 1]), window=st.sampled_from([0, 0, 1, 3, 9, 24]),
    layout=st.sampled_from(["run", "ends", "documents"]), data=st.data(),
)  # fmt: skip
def test_what_is_seen_is_the_mask_token_by_token(
    cuts: Any, ways: int, padding: int, window: int, layout: str, data: st.DataObject
) -> None:
    rows = rows_of(cuts, padding)
    columns = head_tail_columns(LENGTH, ways)
    if layout == "run":
        columns = contiguous_columns(LENGTH, ways)
    elif layout == "documents" and rows.document_ids is not None:
        columns = head_tail_columns_by_document(rows.document_ids, ways)
    check(meeting_of(rows, columns, data.draw(st.integers(0, ways - 1))), window)


@pytest.mark.parametrize("ways", [2, 3, 4])
def test_heads_and_tails_need_no_mask_and_are_half_blocks(ways: int) -> None:
    """Every coordinate works on as many pairs: its own triangle, and half a block of each other."""
    size, half = LENGTH // ways, LENGTH // ways // 2
    for own in range(ways):
        met = check(meeting_of(rows_of(None), head_tail_columns(LENGTH, ways), own), 0)
        assert met[own] == Block((0, size), (0, size), Sees.CAUSAL)
        assert set(met[:own]) <= {Block((0, size), (0, half), Sees.ALL)}
        assert set(met[own + 1 :]) <= {Block((half, size), (0, size), Sees.ALL)}


def test_runs_see_all_before_them_and_nothing_behind() -> None:
    met = check(meeting_of(rows_of(None), contiguous_columns(LENGTH, 3), 1), 0)
    assert [block.sees for block in met] == [Sees.ALL, Sees.CAUSAL, Sees.NOTHING]


def test_blocks_of_other_documents_and_behind_a_window_are_left_out() -> None:
    one = check(meeting_of(rows_of([[12], [12]]), contiguous_columns(LENGTH, 4), 2), 0)
    assert [block.sees for block in one] == [Sees.NOTHING, Sees.NOTHING, Sees.CAUSAL, Sees.NOTHING]
    two = check(meeting_of(rows_of(None), contiguous_columns(LENGTH, 4), 3), 7)
    assert [block.sees for block in two] == [Sees.NOTHING, Sees.NOTHING, Sees.MASKED, Sees.CAUSAL]
    assert two[2] == Block((0, 6), (0, 6), Sees.MASKED)
    assert check(meeting_of(rows_of(None), contiguous_columns(LENGTH, 4), 3), 4)[2].queries == (0, 3)


def test_compiled_units_meet_the_same_rectangles_whatever_the_documents() -> None:
    columns = head_tail_columns(LENGTH, 2)
    met = [blocks(meeting_of(rows_of([cut, cut]), columns, 1, fixed=True)) for cut in ([3], [20], [12, 13])]
    assert met == [(Block((0, 12), (0, 12), Sees.MASKED),) * 2] * 3
    free = [blocks(meeting_of(rows_of(None), columns, 1, fixed=fixed), window=5) for fixed in (False, True)]
    assert free[0] == free[1]


def test_kernels_get_five_numbers_a_block() -> None:
    met = blocks(meeting_of(rows_of(None), head_tail_columns(LENGTH, 2), 0))
    numbers = flat(met)
    assert tuple(block_of(numbers, source) for source in range(len(met))) == met
    assert [numbers[low:high] for low, high in pairwise(range(0, 11, 5))] == [(0, 12, 0, 12, 2), (6, 12, 0, 12, 1)]
