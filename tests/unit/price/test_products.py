"""Products of any shape: tiles, waves and alignment."""

import numpy as np
import pytest

from meshwright.price.constants import VALUES
from meshwright.price.products import alignment, product_seconds

RATE, PROCESSORS = 1e15, 132


def efficiency(m: float, n: float, k: float, count: float = 1.0) -> float:
    seconds = product_seconds(VALUES, RATE, PROCESSORS, m, n, k, count)
    return float(2 * m * n * k * count / RATE / seconds)


def test_large_products_reach_the_rate() -> None:
    assert 0.94 < efficiency(65536, 8192, 8192) <= 1.0


def test_small_products_do_not() -> None:
    assert efficiency(128, 128, 128) < 0.02


def test_a_wave_that_is_hardly_begun_costs_most_of_one() -> None:
    full = efficiency(128 * PROCESSORS, 256, 8192)
    begun = efficiency(128 * PROCESSORS + 128, 256, 8192)
    assert begun < 0.85 * full


@pytest.mark.parametrize(
    ("k", "factor"), [(128, 1.0), (64, 1.0), (96, 1.1), (72, 1.1), (108, 8.0), (4, 8.0), (225, 12.0), (2, 12.0)]
)
def test_alignment_counts_whole_numbers(k: int, factor: float) -> None:
    assert float(alignment(VALUES, np.array(128.0), np.array(float(k)))) == pytest.approx(factor)


def test_many_small_products_fill_the_device_together() -> None:
    assert efficiency(64, 1536, 4096, count=128) > 4 * efficiency(64, 1536, 4096)
