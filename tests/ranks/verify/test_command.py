"""`meshwright verify` as it is typed."""

import json
import subprocess
import sys

import pytest

from meshwright.testing.models import m0_bytes, overrides

_KEYS = {"mesh", "parallel", "ok", "loss", "gradient", "norm", "update", "worst", "first"}


def _verify(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshwright", "verify", *words], capture_output=True, text=True, timeout=110
    )


@pytest.mark.timeout(120)
def test_json_of_a_data_parallel_run() -> None:
    run = m0_bytes(mesh={"dp": 2}, batch={"global": 8, "micro": 2}, data={"sequence_length": 16})
    done = _verify(*overrides(run), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] is True
    assert told["tolerance"] == 1e-12
    assert [rung["name"] for rung in told["rungs"]] == [
        "one process",
        "dp",
        "accumulation",
        "dp + accumulation",
        "dp + accumulation + precision",
    ]
    for rung in told["rungs"]:
        assert set(rung) >= _KEYS
        assert rung["first"] is None
        exact = "precision" not in rung
        assert max(rung[key] for key in ("loss", "gradient", "norm", "update")) <= (1e-12 if exact else 1e-3)
    assert [rung["mesh"]["dp"] for rung in told["rungs"]] == [1, 2, 1, 2, 2]
    assert [rung["batch"]["micro"] for rung in told["rungs"]] == [8, 4, 2, 2, 2]
    assert "optimizer and precision are the ladder's own" in done.stderr


def test_an_impossible_run_is_refused_before_anything_starts() -> None:
    done = _verify("batch.global=7", "batch.micro=2")
    assert done.returncode == 2
    assert done.stderr.startswith("error: batch.global = 7 with batch.micro = 2 on dp 2")
    assert not done.stdout
