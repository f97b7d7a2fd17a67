"""Which sample comes when: a seeded order that is computed, never stored.

An epoch's order is a permutation of 0 .. N-1 keyed by (seed, epoch). It is an unbalanced Feistel network over the
grid Z_a x Z_b (a*b >= N, barely), with cycle walking for the few grid points outside: format-preserving encryption
of integers (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). Entry k costs the same
wherever it lies, so resuming anywhere is free, nothing of the corpus' size is held, and the order cannot depend on
the batch size or on the layout.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
import numpy.typing as npt

from meshwright.config.choices import Order
from meshwright.layout.rows import Integers

_Words = npt.NDArray[np.uint64]

_ROUNDS = 12  # below 12 the orders of five or six samples are measurably uneven
_MAX_SAMPLES = 1 << 62
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def sample_ids(order: Order, seed: int, num_samples: int, start: int, count: int) -> Integers:
    """Entries [start, start + count) of the concatenated epochs -> (count,) int64 ids in [0, num_samples).

    `start` is the number of samples consumed so far: a step of G samples takes entries [start, start + G). Each epoch
    holds every id once; shuffled epochs are permuted anew. Raises ValueError where nothing could be drawn or an index
    would leave 63 bits.
    """
    if not 1 <= num_samples <= _MAX_SAMPLES:
        raise ValueError(f"an order needs between 1 and 2^62 samples, not {num_samples}")
    if start < 0 or count < 0 or start + count >= 1 << 63:
        raise ValueError(f"entries [{start}, {start} + {count}) of an order do not exist")
    entries = start + np.arange(count, dtype=np.int64)
    epochs, within = np.divmod(entries, np.int64(num_samples))
    if order is Order.SEQUENTIAL:
        return within
    return _permuted(within.astype(np.uint64), _keys(seed, epochs), num_samples).astype(np.int64)


def _permuted(within: _Words, keys: _Words, num_samples: int) -> _Words:
    """The permutation under each entry's own key; walks on from grid points outside until it is inside."""
    rows = isqrt(num_samples - 1) + 1
    columns = -(-num_samples // rows)
    values = _network(within, keys, rows, columns)
    outside = np.flatnonzero(values >= np.uint64(num_samples))
    while outside.size:
        values[outside] = _network(values[outside], keys[outside], rows, columns)
        outside = outside[values[outside] >= np.uint64(num_samples)]
    return values


def _network(values: _Words, keys: _Words, rows: int, columns: int) -> _Words:
    """A bijection of [0, rows * columns): each round adds a keyed hash of one coordinate to the other."""
    modulus, other_modulus = np.uint64(rows), np.uint64(columns)
    left, right = np.divmod(values, other_modulus)
    for number in range(_ROUNDS):
        round_key = keys + np.uint64((number + 1) * _GOLDEN & _WORD)
        left = (left + _mixed(right * np.uint64(_GOLDEN) ^ round_key) % modulus) % modulus
        left, right = right, left
        modulus, other_modulus = other_modulus, modulus
    return left * np.uint64(columns) + right


def _keys(seed: int, epochs: Integers) -> _Words:
    """A 64-bit key for each entry, from (seed, epoch)."""
    base = _mixed(np.array([seed & _WORD], dtype=np.uint64))
    return _mixed(base + epochs.astype(np.uint64) * np.uint64(_GOLDEN))


def _mixed(words: _Words) -> _Words:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection of 64-bit words."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
