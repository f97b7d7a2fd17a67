"""The step in the closing table: its parts, predicted beside measured."""

from __future__ import annotations

import re

import pytest

import meshwright as mw
from meshwright.config.load import load_run
from meshwright.price.price import Price, price
from meshwright.train.spent import spent_rows
from meshwright.train.stopwatch import COMPUTE_PARTS, STEP_PARTS

WORDS = ("mesh.dp=2", "mesh.pp=2", "mesh.tp=2", "parallel.recompute=full", "batch.micro=2")


@pytest.fixture(scope="module")
def own() -> Price:
    return price(mw.plan(load_run(None, list(WORDS))), "h100-sxm")


@pytest.fixture
def measured() -> dict[str, float]:
    parts = dict(zip(STEP_PARTS, (4.0, 2.0, 1.0, 0.5, 0.0, 0.0, 1.0, 0.75, 0.25, 0.5), strict=True))
    return parts | {"forward": 1.0, "backward": 2.0, "recompute": 1.0}


def seconds(cell: str) -> float:
    number, unit = cell.split()[:2]
    return float(number) * {"s": 1.0, "ms": 1e-3}[unit]


def test_parts_add_up_to_the_step_on_both_sides(own: Price, measured: dict[str, float]) -> None:
    step, *rows = spent_rows(own, measured, 20.0)
    parts = [row for row in rows if not row[0].startswith("    ")]
    inner = [row for row in rows if row[0].startswith("    ")]
    assert len(inner) == len(set(COMPUTE_PARTS.values()))
    for side in (1, 2):
        assert sum(seconds(row[side]) for row in parts) == pytest.approx(seconds(step[side]), rel=2e-3)
        assert sum(seconds(row[side]) for row in inner) == pytest.approx(seconds(parts[0][side]), rel=5e-3)
        shares = [int(re.findall(r"(-?\d+) %", row[side])[0]) for row in parts]
        assert sum(shares) == pytest.approx(100, abs=4)


def test_a_mean_step_is_shown_as_parts_of_the_median_one(own: Price, measured: dict[str, float]) -> None:
    """The ten parts are 10 s together: each is doubled beside a median of 20 s."""
    rows = {row[0].strip(): row[2] for row in spent_rows(own, measured, 20.0)}
    assert rows["computation"].split() == ["8.000", "s", "40", "%"]
    assert rows["recomputation"].split() == ["2.000", "s", "10", "%"]
    assert rows["data"].split() == ["0.500", "s", "2", "%"]


def test_full_recomputation_costs_what_a_forward_of_blocks_does(own: Price) -> None:
    parts = own.compute_parts
    assert sum(parts.values()) == pytest.approx(own.parts["compute"])
    assert 0 < parts["recompute"] < parts["forward"] < parts["backward"]
    kept = price(mw.plan(load_run(None, [*WORDS, "parallel.recompute=none"])), "h100-sxm")
    assert kept.compute_parts["recompute"] == 0


def test_where_launches_are_no_work_only_the_step_is_measured(own: Price) -> None:
    step, *rows = spent_rows(own, None, 0.5)
    assert step[2].split() == ["0.500", "s"]
    assert {row[2] for row in rows} == {"-"}


def test_what_nobody_spends_is_no_row(own: Price, measured: dict[str, float]) -> None:
    names = {row[0].strip() for row in spent_rows(own, measured, 20.0)}
    assert not {"context axis", "expert axis"} & names
    assert {"replicas", "tensor axis", "messages", "pipeline bubble", "optimizer", "data", "other"} <= names


def test_lines_fit_a_narrow_terminal(own: Price, measured: dict[str, float]) -> None:
    from meshwright.observe.figures import table_lines

    for rows in (spent_rows(own, measured, 20.0), spent_rows(guessed(), measured, 20.0)):
        labelled = [["  with activations, at most", "1023.9 MiB", "1023.9 MiB"], *rows]
        assert max(map(len, table_lines(["of rank 0", "predicted", "measured"], labelled))) <= 80


def guessed() -> Price:
    from dataclasses import replace

    from meshwright.price.catalogue import cluster_of

    cluster = cluster_of("h100-sxm")
    sources = {**cluster.sources, "device.matrix_flops": "guess"}
    return Price(mw.plan(load_run(None, list(WORDS))), replace(cluster, sources=sources))


def test_guesses_are_shares_and_a_range(measured: dict[str, float]) -> None:
    step, *rows = spent_rows(guessed(), measured, 20.0)
    assert re.fullmatch(r"guess: [\d.]+ m?s to [\d.]+ m?s", step[1])
    assert all(re.fullmatch(r"guess: +-?\d+ %", row[1]) for row in rows)
