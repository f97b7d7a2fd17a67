"""A price from the words one would type, for tests."""

from __future__ import annotations

from meshwright.price.price import Price
from meshwright.price.request import requested


def ask(*words: str, cluster: str = "h100-sxm", gpus: int | None = None, rank: int = 0) -> Price:
    _, plan, where = requested(None, words, cluster, gpus)
    return Price(plan, where, rank)
