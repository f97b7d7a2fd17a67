"""Key/value heads of ranks that divide them: every query head finds the one that serves it on its own rank."""

from __future__ import annotations

import pytest

from meshwright.arch.heads import kv_heads_divide, met_kv_heads, own_kv_heads


@pytest.mark.parametrize(("kv_heads", "ways", "own", "met"), [(4, 2, 2, 4), (4, 4, 1, 4), (2, 4, 1, 4), (1, 3, 1, 3)])
def test_a_rank_has_its_share_or_a_copy(kv_heads: int, ways: int, own: int, met: int) -> None:
    assert kv_heads_divide(kv_heads, ways)
    assert (own_kv_heads(kv_heads, ways), met_kv_heads(kv_heads, ways)) == (own, met)


@pytest.mark.parametrize(("kv_heads", "ways"), [(2, 3), (3, 2), (6, 4), (4, 6)])
def test_what_is_neither_share_nor_copy_does_not_divide(kv_heads: int, ways: int) -> None:
    assert not kv_heads_divide(kv_heads, ways)
