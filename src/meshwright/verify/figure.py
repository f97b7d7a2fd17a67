"""The figure of difference: max|a - b| / max(max|b|, 1e-3·M), M the largest |b| over all tensors of the kind; 0/0 = 0.

A tensor whose values are mathematically zero has no relative difference; M gives it a scale of its kind.
"""

from __future__ import annotations

import math

from meshwright.verify.trace import Figures, Quantity

__all__ = ["figure", "relative", "scale"]

_SHARE = 1e-3


def scale(figures: Figures, quantity: Quantity) -> float:
    """What a difference of `quantity` is divided by."""
    return max(figures.largest[quantity.key], _SHARE * figures.largest_of(quantity.kind))


def figure(difference: float, divisor: float) -> float:
    """`difference` over `divisor`; 0/0 is 0, and a difference from nothing is infinite."""
    if difference == 0.0:
        return 0.0
    return difference / divisor if divisor else math.inf


def relative(actual: float, expected: float) -> float:
    """The figure of a single number."""
    if math.isnan(actual) or math.isinf(actual):
        return math.inf
    return figure(abs(actual - expected), abs(expected))
