"""The seeded order: a bijection each epoch, the same wherever one starts and however one steps."""

from collections import Counter
from math import factorial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.choices import Order
from meshwright.data.order import sample_ids

SHUFFLED, SEQUENTIAL = Order.SHUFFLED, Order.SEQUENTIAL


@given(st.integers(1, 3000), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_every_epoch_holds_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    ids = sample_ids(SHUFFLED, seed, num_samples, epoch * num_samples, num_samples)
    assert ids.dtype == np.int64
    assert sorted(ids.tolist()) == list(range(num_samples))


@given(
    st.sampled_from([SHUFFLED, SEQUENTIAL]),
    st.integers(1, 500),
    st.lists(st.integers(0, 90), max_size=20),
    st.integers(0, 2000),
)
def test_any_cut_of_the_order_is_the_uninterrupted_order(
    order: Order, num_samples: int, steps: list[int], start: int
) -> None:
    """B74 (KempnerForge#51): resuming anywhere, twice, or with another batch size repeats and skips nothing."""
    uninterrupted = sample_ids(order, 1, num_samples, start, sum(steps)).tolist()
    resumed: list[int] = []
    for count in steps:
        resumed += sample_ids(order, 1, num_samples, start + len(resumed), count).tolist()
    assert resumed == uninterrupted


def test_sequential_is_file_order_again_and_again() -> None:
    assert sample_ids(SEQUENTIAL, 9, 3, 1, 7).tolist() == [1, 2, 0, 1, 2, 0, 1]


def test_epochs_and_seeds_are_ordered_apart() -> None:
    first, second = sample_ids(SHUFFLED, 0, 5000, 0, 10000).reshape(2, 5000)
    other = sample_ids(SHUFFLED, 1, 5000, 0, 5000)
    identity = np.arange(5000)
    for a, b in [(first, second), (first, other), (first, identity), (first[:-1], first[1:])]:
        assert (a == b).sum() < 10
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.06  # four deviations of chance


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5])
def test_all_orders_of_few_samples_are_equally_likely(num_samples: int) -> None:
    """Chi-squared over 36,000 epochs: its mean a degree of freedom is 1, far from it in either sense is a fault."""
    epochs = 36_000
    orders = sample_ids(SHUFFLED, 7, num_samples, 0, epochs * num_samples).reshape(epochs, num_samples)
    counts = Counter(map(tuple, orders.tolist()))
    expected = epochs / factorial(num_samples)
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert len(counts) == factorial(num_samples)
    assert chi_squared / (factorial(num_samples) - 1) < 6


def test_the_order_is_frozen() -> None:
    """A changed order would silently change every run that resumes."""
    assert sample_ids(SHUFFLED, 0, 42_551, 0, 6).tolist() == [42311, 17385, 37218, 36067, 11085, 25259]


def test_sizes_beyond_32_bits_stay_positive_and_exact() -> None:
    """B76 (gpt-neox#493)."""
    for num_samples in (2**31 + 10, 2**40 + 3, 2**62):
        start = 2**62 - 100
        ids = sample_ids(SHUFFLED, 3, num_samples, start, 200)
        assert ids.min() >= 0
        assert ids.max() < num_samples
        assert ids.max() > 0.9 * num_samples
        assert sample_ids(SEQUENTIAL, 3, num_samples, start, 3).tolist() == [
            (start + entry) % num_samples for entry in range(3)
        ]
    within_an_epoch = sample_ids(SHUFFLED, 3, 2**31 + 10, 0, 100_000)
    assert len(np.unique(within_an_epoch)) == 100_000


@pytest.mark.parametrize(
    ("num_samples", "start", "count"),
    [(0, 0, 1), (2**62 + 1, 0, 1), (5, -1, 1), (5, 0, -1), (5, 2**63 - 1, 1)],
)
def test_what_cannot_be_ordered_is_refused(num_samples: int, start: int, count: int) -> None:
    with pytest.raises(ValueError):
        sample_ids(SHUFFLED, 0, num_samples, start, count)
