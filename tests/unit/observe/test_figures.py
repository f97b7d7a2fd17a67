"""Figures as text."""

import pytest

from meshwright.observe.figures import bytes_text, duration_text, rate_text, table_lines


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (80 * 2**30, "80.0 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0125, "12 ms"), (1, "1.00 s"), (59.4, "59 s"), (59.7, "1m 00s"), (75, "1m 15s"), (7260, "2h 01m")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_rates() -> None:
    assert rate_text(5.2e10, "FLOP/s") == "52.0 GFLOP/s"
    assert rate_text(12, "B/s") == "12 B/s"


def test_a_table_is_aligned() -> None:
    assert table_lines(["group", "calls"], [["dense", "6"], ["world", "12"]]) == [
        "group  calls",
        "-----  -----",
        "dense      6",
        "world     12",
    ]
