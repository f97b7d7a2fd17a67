"""Fingerprints of logical tensors that any layout computes from its pieces.

    fingerprint = Σ_i  bits(i) · Π_d h_d(i_d)    mod 2^64

`bits` is an element's stored pattern read as an unsigned integer, i its index in the whole tensor, h_d an odd 64-bit
number for each index of dimension d. A sum has no order, so the pieces' fingerprints, each element by its owner, add up
to the whole's. The weights are products of odd numbers, hence odd, hence invertible mod 2^64: no change of a single
element goes unseen. Elements that swap places are seen because their weights differ; that two or more changes cancel
has about one chance in 2^64 (multilinear hashing, Carter and Wegman 1979). It guards against faults, not attackers.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from meshwright.layout.rectangles import Rectangle

__all__ = ["Words", "add", "fingerprint", "multipliers", "shown"]

Words = npt.NDArray[np.uint64]

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


def fingerprint(values: npt.NDArray[np.generic], rectangle: Rectangle) -> int:
    """The part that `values`, of the shape of `rectangle` and of 1, 2, 4 or 8 bytes an element, adds to the sum."""
    pattern = np.dtype(f"u{values.dtype.itemsize}")
    words: Words = np.ascontiguousarray(values).reshape(rectangle.extent).view(pattern).astype(np.uint64)
    for dim in reversed(range(words.ndim)):
        words = (words * multipliers(dim, rectangle.start[dim], rectangle.extent[dim])).sum(-1, dtype=np.uint64)
    return int(words)


def add(parts: Iterable[int]) -> int:
    """The fingerprint of a tensor from those of its pieces, each element once."""
    return sum(parts) & _BITS


def shown(value: int) -> str:
    """16 hexadecimal digits, as files hold them."""
    return f"{value:016x}"
