"""The divisors of a number that come nearest to the one that was asked for: what a refusal offers instead."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from math import isqrt

__all__ = ["nearest_divisors"]

# A refusal is to come at once: of numbers above the square of this, divisors far from both ends are not looked for.
_TRIED = 1 << 20


def nearest_divisors(number: int, wanted: int, fits: Callable[[int], bool] = lambda _: True) -> list[int]:
    """The divisors of `number` that `fits` next to `wanted`, nearest first, at most three."""
    small = [size for size in range(1, min(isqrt(number), _TRIED) + 1) if number % size == 0]
    divisors = {*small, *(number // size for size in small)}
    return list(islice(filter(fits, sorted(divisors, key=lambda size: (abs(size - wanted), size))), 3))
