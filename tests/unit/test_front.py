"""The public names of the package."""

import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.config.errors import RequestError
from meshwright.config.load import load_run


def test_a_run_is_planned_whatever_names_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[mesh]\ndp = 4\n")
    plans = [mw.plan(file), mw.plan(str(file)), mw.plan({"mesh": {"dp": 4}}), mw.plan(load_run(file))]
    assert plans == [plans[0]] * 4
    assert plans[0].degrees.ranks == 4
    assert mw.plan({"mesh": {"dp": "fill"}}, ranks=2) == mw.plan({})
    with pytest.raises(RequestError, match="must be a multiple"):
        mw.plan({"mesh": {"dp": 3}})


def test_a_mesh_is_plain_data_until_it_starts() -> None:
    assert mw.Mesh(dp=2, tp=2).degrees.ranks == 4


def test_names_exist_and_others_do_not() -> None:
    assert {*mw.__all__} <= {*dir(mw)}
    assert all(callable(getattr(mw, name)) for name in {*mw.__all__} - {"checkpoint"})
    assert callable(mw.checkpoint.save)
    assert callable(mw.checkpoint.load)
    with pytest.raises(AttributeError, match="nothing"):
        mw.nothing  # noqa: B018


def test_planning_needs_no_torch() -> None:
    code = "import sys, meshwright as mw; mw.plan({}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_plan_prints_what_was_decided() -> None:
    plan = mw.plan({"mesh": {"dp": 2, "pp": 2}, "parallel": {"zero": 1, "schedule": "zb-h1"}})
    lines = dict(line.split(maxsplit=1) for line in str(plan).splitlines())
    assert plan.math in lines["plan"]
    assert plan.layout in lines["plan"]
    assert lines["mesh"] == "4 ranks: pp 2 x dp 2"
    assert lines["sharding"].startswith("stage 1, within 0")
    assert lines["pipeline"].startswith("schedule zb-h1, chunks 1")
    assert lines["batch"].endswith("2 micro-batches of 4 on each of 2 replicas")
    cut = mw.plan({"mesh": {"dp": 1, "cp": 4}, "parallel": {"context_inner": 2}})
    assert "4 ranks: cp 4, ring over ulysses groups of 2" in str(cut)
