"""A pairwise cover: few combinations in which every two values of two axes meet somewhere.

Most faults of combination need two features to meet, not five; so pairs are run often and the whole product never
(Cohen et al. 1997, "The AETG System", doi 10.1109/32.605761). Greedy and deterministic: equal axes give equal covers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, islice, product
from typing import Any

__all__ = ["Pair", "Row", "pairs_of", "pairwise"]

Row = dict[str, Any]
"""One value of each axis."""

Pair = tuple[tuple[str, Any], tuple[str, Any]]
_TRIES = 400


def pairwise(axes: Mapping[str, Sequence[Any]], legal: Callable[[Row], bool]) -> list[Row]:
    """Rows that together hold every pair of values that any legal row found holds.

    The first value of an axis is its plainest. Pairs for which no legal row is found are left out: look at
    `pairs_of` where that matters.
    """
    missing = dict.fromkeys(_all_pairs(axes))  # a dict keeps the order
    rows: list[Row] = []
    while missing:
        wanted = next(iter(missing))
        row = next((row for row in islice(_candidates(axes, wanted, missing), _TRIES) if legal(row)), None)
        if row is None:
            del missing[wanted]
            continue
        rows.append(row)
        for pair in pairs_of(row):
            missing.pop(pair, None)
    return rows


def pairs_of(row: Row) -> Iterator[Pair]:
    """Every two axes of a row with their values, in the order of the axes."""
    yield from combinations(row.items(), 2)


def _all_pairs(axes: Mapping[str, Sequence[Any]]) -> Iterator[Pair]:
    for one, other in combinations(axes, 2):
        for pair in product(axes[one], axes[other]):
            yield (one, pair[0]), (other, pair[1])


def _candidates(axes: Mapping[str, Sequence[Any]], wanted: Pair, missing: Mapping[Pair, None]) -> Iterator[Row]:
    """Rows with the wanted pair: the value of every axis first that would cover most, then the others in turn."""
    chosen: Row = dict(wanted)
    choices: dict[str, list[Any]] = {name: [value] for name, value in wanted}
    for name, values in axes.items():
        if name in choices:
            continue
        gains = {value: _gain(axes, {**chosen, name: value}, name, missing) for value in values}
        choices[name] = sorted(values, key=lambda value, gains=gains: -gains[value])  # type: ignore[misc]
        chosen[name] = choices[name][0]
    for values in product(*(choices[name] for name in axes)):
        yield dict(zip(axes, values, strict=True))


def _gain(axes: Mapping[str, Sequence[Any]], row: Row, name: str, missing: Mapping[Pair, None]) -> int:
    """How many missing pairs the value of axis `name` makes with what is chosen."""
    ordered = {axis: row[axis] for axis in axes if axis in row}
    return sum(pair in missing for pair in pairs_of(ordered) if name in (pair[0][0], pair[1][0]))
