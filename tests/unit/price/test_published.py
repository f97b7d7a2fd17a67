"""Published runs: step times with one publication left out, memory, what fits and what does not.

Bars, with every publication priced by constants that never saw it: median error of step times at most 6.5 %, nine of
ten dense runs within 20 %. Memory at most 6 %. The table is in docs/pricing.md (`benchmarks/price.py`).
"""

import contextlib
import io
import json
import re

import numpy as np
import pytest

from meshwright.cli.main import main
from meshwright.price.price import Price
from tests.unit.price import fitting, published
from tests.unit.price.ask import ask
from tests.unit.price.fitting import Case, cases, left_out


@pytest.mark.timeout(300)
def test_step_times_with_one_publication_left_out() -> None:
    found = left_out()
    dense = np.concatenate(
        [
            errors[[not one.row["model"].get("experts") for one in cases() if published.source(one.row) == name]]
            for name, errors in found.items()
        ]
    )
    every = np.concatenate(list(found.values()))
    assert len(every) == 152
    assert np.median(np.abs(every)) <= 0.065
    assert np.median(np.abs(dense)) <= 0.065
    assert np.mean(np.abs(dense) <= 0.20) >= 0.90
    assert np.quantile(np.abs(every), 0.9) <= 0.20


def test_the_shipped_constants_are_what_all_runs_ask_for() -> None:
    asked = fitting.fit(np.ones(len(cases()), dtype=bool))
    assert {name: asked[name] for name in fitting.FITTED} == pytest.approx(
        {name: fitting.VALUES[name] for name in fitting.FITTED}, rel=0.03
    )


@pytest.mark.timeout(300)
def test_runs_that_no_constant_ever_saw() -> None:
    """The other tier of the same file: no residual of it was looked at, nothing is filled in."""
    found = []
    for row in published.rows("bulk"):
        if row["measured"].get("iter_time_s") and row["model"].get("attention") != "hybrid linear":
            found.append(float(np.exp(fitting.errors([fitting.case(row)]))[0]) - 1)
    assert len(found) == 157
    assert np.median(np.abs(found)) <= 0.065
    assert np.quantile(np.abs(found), 0.9) <= 0.20


def memory_error(one: Case) -> float:
    """Like with like: nvidia-smi shows the device's (GiB), torch's own peaks are what it reserved (decimal GB)."""
    measured, memory = one.row["measured"], one.estimate().memory
    if "nvidia-smi" in measured["memory_kind"]:
        return float(memory.device[0]) / 2**30 / float(measured["memory_gb"]) - 1
    return float(memory.reserved[0]) / 1e9 / float(measured["memory_gb"]) - 1


def test_memory_by_its_kind() -> None:
    found = np.array([memory_error(fitting.case(row)) for row in published.rows() if row["measured"].get("memory_gb")])
    assert len(found) == 46
    assert np.median(np.abs(found)) <= 0.06
    assert np.quantile(np.abs(found), 0.9) <= 0.15


def test_allocated_and_reserved_are_told_apart() -> None:
    """Eight runs publish both: reserved is 1.01 to 1.18 of allocated, more for small ones: a share and a constant."""
    pairs = [row["measured"] for row in published.rows() if row["measured"].get("peak_allocated_mib")]
    values = fitting.VALUES
    errors = [
        (pair["peak_allocated_mib"] * values["memory.slack"] + values["memory.slack_bytes"] / 2**20)
        / pair["peak_reserved_mib"]
        - 1
        for pair in pairs
    ]
    assert len(pairs) == 8
    assert np.max(np.abs(errors)) < 0.11
    assert np.median(np.abs(errors)) < 0.03


IMPOSSIBLE = {"bridge-26.02.01-Llama-3.1-70B-GB300-64g-NVFP4-gbs256-tp1pp1cp1ep1"}
"""Whole states of 70e9 parameters on every device of 288 GB: its table omits that they are sharded."""


def test_every_run_that_ran_fits() -> None:
    """Of all tiers; what a row does not say of recomputation is the least that fits."""
    rows = [row for row in (*published.rows("core"), *published.rows("bulk")) if row["measured"].get("iter_time_s")]
    ran = [row for row in rows if row["model"].get("attention") != "hybrid linear"]
    assert len(ran) >= 300
    assert {row["id"] for row in ran if not fitting.fits(fitting.completed(row))} == IMPOSSIBLE


def price_of(row: published.Row) -> Price:
    words = published.words(row)
    return ask(*words[4:], cluster=words[1], gpus=int(words[3]))


def test_no_run_that_ran_out_of_memory_surely_fits() -> None:
    """One is a fifth too large; of the other see the next test."""
    prices = {row["id"]: price_of(row) for row in published.rows("oom")}
    assert len(prices) == 2
    assert not any(price.fits_surely for price in prices.values())
    assert not prices["bloom-12288x100-tp4pp6dp16-mbs1-oom-02-28"].fits


def test_one_run_that_ran_out_of_memory_is_no_larger_than_one_that_ran() -> None:
    """Same page, day, mesh, heads, batch and optimizer: 94 blocks of 13312 ran in 67 GiB, 82 of 14336 did not.

    The first stage holds 4.56e9 and 4.60e9 parameters and 6 and 7 blocks' inputs: no account of a step's memory tells
    the two apart, so that a price which refuses one refuses the other. It is told as one that fits only just.
    """
    row = next(row for row in published.rows("oom") if "14336x82" in row["id"])
    ran = {**row, "model": {**row["model"], "layers": 94, "hidden": 13312, "ffn_hidden": 53248}}
    out, inside = price_of(row), price_of(ran)
    assert out.memory["device"] == pytest.approx(inside.memory["device"], rel=0.03)
    assert inside.memory["device"] / 2**30 == pytest.approx(67, rel=0.10)
    assert (out.fits, out.fits_surely, inside.fits) == (True, False, True)


@pytest.mark.parametrize("tier", ["core", "bulk", "oom"])
def test_the_command_prices_every_row(tier: str) -> None:
    for row in published.rows(tier)[::4]:
        if row["model"].get("attention") == "hybrid linear":
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main(["estimate", "--json", *published.words(row)]) == 0, row["id"]
        time = json.loads(out.getvalue())["time"]
        parts = ("compute", "dp", "tp", "pp", "cp", "ep", "bubble", "optimizer", "data", "other")
        assert sum(time[name] for name in parts) == pytest.approx(time["step_seconds"])
        assert min(time[name] for name in parts) > -0.02 * time["step_seconds"]


def test_no_model_or_publication_is_named_in_the_model() -> None:
    from pathlib import Path

    import meshwright.price

    sources = {published.source(row).split()[0] for row in published.rows()} | {"llama-3", "qwen", "gpt-oss"}
    text = "\n".join(
        line.split("#")[0]
        for file in Path(meshwright.price.__file__).parent.glob("*.py")
        for line in file.read_text().lower().splitlines()
        if "arxiv" not in line and '"""' not in line and "_narayanan" not in line and "_korthikanti" not in line
    )
    assert not [name for name in sources - {"megatron"} if re.search(rf"\b{re.escape(name)}", text)]


def test_unstated_recomputation_is_the_least_that_fits() -> None:
    unsaid = [one for one in cases() if one.row["recompute"] is None]
    assert len(unsaid) >= 40
    for one in unsaid:
        if one.layouts.recompute[0] > 0:
            assert not fitting.fits(fitting.case(one.row))
