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
from tests.unit.price import fitting, published
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


UNWRITABLE = {"moezoo-qwen3-235b-tp2ep32pp8-19.7", "moezoo-qwen3-235b-tp2ep8pp32-24.2"}
"""Their expert groups fold over the tensor axis; a mesh whose axes multiply holds more of each expert."""

OFFLOADED = {"narayanan21-t2-zero3-530B-640"}
"""ZeRO-3 with whole attention squares: 5 a s^2 b of a block is what its text recomputes in parts."""


def test_every_run_that_ran_fits() -> None:
    tight = [one.row["id"] for one in cases() if not fitting.fits(one)]
    assert set(tight) <= UNWRITABLE | OFFLOADED


def test_what_ran_out_of_memory_does_not_fit_comfortably() -> None:
    """One of the two is far too large; the other needs nine tenths of the device before anything fragments."""
    far, near = sorted(
        (fitting.case(row).estimate().memory.device[0] / 84.99e9 for row in published.rows("oom")), reverse=True
    )
    assert far > 1.2
    assert near > 0.9


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
