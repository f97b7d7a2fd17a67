"""Fingerprints of logical tensors that any layout computes from its pieces.

    fingerprint = Σ_i  bits(i) · Π_d h_d(i_d)    mod 2^64

`bits` is an element's stored pattern read as an unsigned integer, i its index in the whole tensor, h_d an odd 64-bit
number for each index of dimension d. A sum has no order, so the pieces' fingerprints, each element by its owner, add up
to the whole's. The weights are products of odd numbers, hence odd, hence invertible mod 2^64: no change of a single
element goes unseen. Elements that swap places are seen because their weights differ (multilinear hashing, Carter and
Wegman 1979). It guards against faults, not attackers.

An element of 64 bits counts as two of 32, side by side along the last dimension, low half first. An odd number times
2^63 is 2^63, whatever the number: of 64-bit patterns two flipped signs would always cancel. Of patterns of at most 32
bits they cancel where both weights agree in 33 bits, one chance in 2^32, and less for every lower bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from meshwright.layout.rectangles import Rectangle

__all__ = ["UNIT_BYTES", "Words", "add", "fingerprint", "multipliers", "shown", "units_of"]

Words = npt.NDArray[np.uint64]

UNIT_BYTES = 4
"""Elements that are larger count as several of this size."""

_BITS = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
_DIM_STRIDE = 1 << 40  # no dimension is longer, so no index of one meets an index of another


def multipliers(dim: int, start: int, size: int) -> Words:
    """(size,) h_d(start) .. h_d(start + size - 1): splitmix64 (Steele, Lea and Flood 2014) of place, made odd."""
    first = (dim * _DIM_STRIDE + start + 1) * _GOLDEN & _BITS
    words = np.uint64(first) + np.arange(size, dtype=np.uint64) * np.uint64(_GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (words ^ (words >> np.uint64(31))) | np.uint64(1)


def units_of(element_bytes: int) -> int:
    """How many units an element counts as."""
    return max(element_bytes // UNIT_BYTES, 1)


def fingerprint(values: npt.NDArray[np.generic], rectangle: Rectangle) -> int:
    """The part that `values`, of the shape of `rectangle` and of 1, 2, 4 or 8 bytes an element, adds to the sum."""
    size = values.dtype.itemsize
    start, extent = list(rectangle.start or (0,)), list(rectangle.extent or (1,))
    start[-1], extent[-1] = start[-1] * units_of(size), extent[-1] * units_of(size)
    pattern = np.dtype(f"u{min(size, UNIT_BYTES)}")
    words: Words = np.ascontiguousarray(values).reshape(-1).view(pattern).astype(np.uint64).reshape(extent)
    for dim in reversed(range(len(extent))):
        words = (words * multipliers(dim, start[dim], extent[dim])).sum(-1, dtype=np.uint64)
    return int(words)


def add(parts: Iterable[int]) -> int:
    """The fingerprint of a tensor from those of its pieces, each element once."""
    return sum(parts) & _BITS


def shown(value: int) -> str:
    """16 hexadecimal digits, as files hold them."""
    return f"{value:016x}"
