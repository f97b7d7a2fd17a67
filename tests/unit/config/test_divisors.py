"""What a refusal offers instead: near divisors, found at once however large the number."""

import pytest

from meshwright.config.divisors import nearest_divisors


@pytest.mark.parametrize(
    ("number", "wanted", "near"),
    [(12, 5, [4, 6, 3]), (1, 7, [1]), (7, 3, [1, 7]), (36, 6, [6, 4, 3]), (2**62, 3, [2, 4, 1]), (0, 3, [])],
)
def test_nearest_first(number: int, wanted: int, near: list[int]) -> None:
    assert nearest_divisors(number, wanted) == near


def test_every_divisor_is_found() -> None:
    for number in range(1, 200):
        every = [size for size in range(1, number + 1) if number % size == 0]
        assert nearest_divisors(number, 9) == sorted(every, key=lambda size: (abs(size - 9), size))[:3]


def test_only_what_fits_is_offered() -> None:
    assert nearest_divisors(36, 6, lambda size: size % 2 == 1) == [3, 9, 1]
