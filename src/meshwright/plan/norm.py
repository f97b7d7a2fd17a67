"""The one vector that all ranks add up at the end of a step: float64, summed over the world."""

from __future__ import annotations

from enum import IntEnum


class NormPart(IntEnum):
    """What stands at each index of the packed vector; every element of a gradient is counted by its owner alone."""

    SQUARED = 0  # sum of squares of the gradient
    NONFINITE = 1  # gradient elements that are not finite
    OVERFLOW = 2  # ranks whose loss scale overflowed
    STOP = 3  # ranks that were asked to stop


NORM_FLOATS = len(NormPart)
