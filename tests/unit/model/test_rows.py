"""Rows that were re-indexed on the numpy side are the same cut of the whole rows' tensors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from meshwright.layout.rows import contiguous_columns, head_tail_columns, whole_rows
from meshwright.model import rows_to_torch
from meshwright.model.masks import attention_mask
from meshwright.model.rope import rotate
from tests.unit.model.tiny import GPT2, LLAMA, documents, rows_of

DOCUMENTS = np.concatenate([documents(5, 11), documents(8, 8)])


@pytest.mark.parametrize("layout", [contiguous_columns, head_tail_columns])
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("ids", [None, DOCUMENTS], ids=["packed", "masked"])
def test_rotated_heads_and_random_keys_follow_the_token(layout, degree, ids) -> None:  # type: ignore[no-untyped-def]
    """Documents of 5 + 11 tokens on any context layout: queries after rotation are those of one rank, re-ordered."""
    numbers = whole_rows(3, np.array([4, 9]), 16, ids)
    whole = rows_to_torch(numbers, LLAMA, seed=1, dtype=torch.float64)
    q = torch.randn(2, 16, 4, 16, dtype=torch.float64)
    assert whole.cos is not None
    assert whole.sin is not None
    rotated, keys = rotate(q, whole.cos, whole.sin), whole.token_keys.view(2, 16)
    for columns in layout(16, degree):
        part = rows_to_torch(numbers.columns(columns), LLAMA, seed=1, dtype=torch.float64)
        assert part.cos is not None
        assert part.sin is not None
        assert torch.equal(rotate(q[:, columns], part.cos, part.sin), rotated[:, columns])
        assert torch.equal(part.token_keys.view(2, -1), keys[:, columns])


@pytest.mark.parametrize("arch", [LLAMA, replace(LLAMA, sliding_window=6)], ids=["causal", "sliding"])
def test_masks_of_any_columns_are_cuts_of_the_whole_mask(arch) -> None:  # type: ignore[no-untyped-def]
    whole = rows_of(arch, documents=DOCUMENTS)
    expected = whole.window_mask if arch.sliding_window else whole.mask
    assert expected is not None
    for queries in head_tail_columns(16, 2):
        for keys in head_tail_columns(16, 2):
            block = attention_mask(
                whole.offsets[:, queries],
                whole.offsets[:, keys],
                window=arch.sliding_window,
                query_documents_BS=torch.from_numpy(DOCUMENTS[:, queries]),
                key_documents_BZ=torch.from_numpy(DOCUMENTS[:, keys]),
            )
            assert torch.equal(block, expected[:, :, queries][..., keys])


def test_the_mask_is_drawn_by_hand() -> None:
    """Documents of 3 + 3 tokens, window 2; the last token is padding and sees itself alone besides its past."""
    seen = attention_mask(
        torch.arange(6)[None],
        torch.arange(6)[None],
        window=2,
        query_documents_BS=torch.tensor([[0, 0, 0, 1, 1, 1]]),
        key_documents_BZ=torch.tensor([[0, 0, 0, 1, 1, 1]]),
        key_valid_BZ=torch.tensor([[True, True, True, True, False, False]]),
    )
    drawing = ["#.....", "##....", ".##...", "...#..", "...##.", ".....#"]
    assert ["".join("#" if each else "." for each in row) for row in seen[0, 0].tolist()] == drawing


def test_tables_are_only_what_the_architecture_needs() -> None:
    learned = rows_of(GPT2)
    assert learned.cos is None
    assert learned.sin is None
    assert rows_of(LLAMA, batch=3).cos.shape == (1, 16, 1, 8)  # type: ignore[union-attr]
    assert rows_of(LLAMA, documents=DOCUMENTS).cos.shape == (2, 16, 1, 8)  # type: ignore[union-attr]


def test_rows_do_not_share_memory_with_the_sampler() -> None:
    numbers = whole_rows(0, np.array([4, 9]), 16)
    rows = rows_to_torch(numbers, LLAMA)
    numbers.offsets[:] = 0
    assert rows.offsets[0].tolist() == list(range(16))
