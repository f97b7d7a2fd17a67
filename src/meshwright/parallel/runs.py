"""Runs of tokens whose logits are worked on at a time, so that they stay in a cache."""

from __future__ import annotations

__all__ = ["token_runs"]


def token_runs(tokens: int, vocabulary: int, elements: int, first: int = 0) -> list[tuple[int, int]]:
    """Bounds (low, high) of runs of `tokens` from `first` on, each of at most `elements` logits but of at least one.

    None where no token of the vocabulary is held.
    """
    if not vocabulary:
        return []
    run = max(elements // vocabulary, 1)
    return [(low, min(low + run, first + tokens)) for low in range(first, first + tokens, run)]
