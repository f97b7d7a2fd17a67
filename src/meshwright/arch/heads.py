"""Key/value heads of ranks that divide them: as many on each, and one where there are fewer heads than ranks.

heads   ranks   own   met        such a head serves the queries of several ranks, and each of these has a copy
4       2       2     4
2       4       1     4
2       3       heads that do not divide
"""

from __future__ import annotations

__all__ = ["kv_heads_divide", "met_kv_heads", "own_kv_heads"]


def kv_heads_divide(kv_heads: int, ways: int) -> bool:
    """Whether each of `ways` ranks has as many, or each head as many ranks."""
    return kv_heads % ways == 0 or ways % kv_heads == 0


def own_kv_heads(kv_heads: int, ways: int) -> int:
    """Those of one of `ways` ranks."""
    return max(kv_heads // ways, 1)


def met_kv_heads(kv_heads: int, ways: int) -> int:
    """Those of all the ranks together, each copy counted."""
    return ways * own_kv_heads(kv_heads, ways)
