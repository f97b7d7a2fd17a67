"""`verify` on the ranks of a launcher: real torchrun, simulated Slurm."""

from __future__ import annotations

import json

import pytest

from meshwright.testing.models import m0_bytes, overrides
from tests.ranks.launch.launched import srun, torchrun

_FAULTY = """
import sys
from meshwright.cli.main import main
from meshwright.parallel.executor import Executor
plain = Executor._norm
Executor._norm = lambda self, action: (self.count.mul_(2), plain(self, action))[1]
sys.exit(main(sys.argv[1:]))
"""


def _run(**sections: dict[str, object]) -> list[str]:
    tables = m0_bytes(
        mesh=sections.get("mesh", {"dp": 2}),
        batch=sections.get("batch", {"global": 4, "micro": 2}),
        data={"sequence_length": 8},
        precision={"compute": "float64"},
    )
    return ["verify", *overrides(tables)]


@pytest.mark.timeout(170)
def test_two_of_four_ranks_of_torchrun_do_and_the_others_wait() -> None:
    done = torchrun(4, *_run())
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].split() == ["rung", "loss", "gradient", "norm", "update", "worst"]  # one report, of rank 0
    assert [line.split("  ")[0] for line in lines[1:3]] == ["one process", "dp"]
    assert sum(line.endswith("equal") for line in lines) == 2
    assert done.err.count("2 rungs on up to 2 ranks") == 1


@pytest.mark.prove
@pytest.mark.timeout(170)
def test_json_on_both_ranks_of_torchrun() -> None:
    done = torchrun(2, *_run(mesh={"dp": "fill", "tp": 2}), "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["ok"] is True
    assert {rung["name"] for rung in told["rungs"]} >= {"one process", "tp", "tp + sequence parallel"}
    assert all(max(rung[key] for key in ("loss", "gradient", "norm", "update")) <= 1e-12 for rung in told["rungs"])


@pytest.mark.timeout(170)
def test_a_run_of_more_ranks_is_verified_as_a_twin() -> None:
    first, second = srun(2, *_run(mesh={"dp": 4}, batch={"global": 8, "micro": 2}))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "a scaled-down twin is verified: " in first.err
    assert "dp 4 -> 2" in first.err
    assert "equal" in first.out
    assert second.out == ""


@pytest.mark.prove
@pytest.mark.timeout(170)
def test_every_rank_leaves_with_the_code_of_the_verdict() -> None:
    first, second = srun(2, *_run(), "--json", program=("-c", _FAULTY))
    assert (first.code, second.code) == (1, 1), first.err + second.err
    told = json.loads(first.out)
    assert told["ok"] is False
    assert second.out == ""
