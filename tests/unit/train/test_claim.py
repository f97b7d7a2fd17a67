"""Two runs of one name: the second is told whose the folder is, and a claim never outlives its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.arch.resolve import arch_from_model
from meshwright.cli.main import main
from meshwright.config.errors import RequestError
from meshwright.config.load import build_run
from meshwright.plan.resolve import resolve
from meshwright.testing.models import m0_bytes
from meshwright.train.claim import claimed
from meshwright.train.job import Job, job_of


def job_named(name: str, place: Path) -> Job:
    run = build_run({**m0_bytes(train={"steps": 3, "output": str(place)}), "name": name})
    return job_of(run, resolve(run, arch_from_model(run.model)))


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    one, other = job_named("one", tmp_path), job_named("other", tmp_path)
    with claimed(one):
        with claimed(other):
            pass
        with pytest.raises(RequestError, match=rf"one: process {os.getpid()} on .+ is training there; what works:"):
            claimed(one).__enter__()
    with claimed(one):
        pass
    assert not one.folder.exists()


def test_a_second_run_is_refused_before_ranks_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Started a second time, a run removed what the first was just saving, and cut its figures back."""
    job = job_named("demo", tmp_path)
    job.folder.mkdir()
    with claimed(job):
        assert main(["train", f"train.output={tmp_path}", "train.device=cpu", "checkpoint.resume=none"]) == 2
    assert "is training there" in capsys.readouterr().err


def test_a_claim_goes_with_its_process_however_that_ends(tmp_path: Path) -> None:
    program = f"""
import os, signal
from tests.unit.train.test_claim import job_named
from meshwright.train.claim import claimed
from pathlib import Path
held = claimed(job_named("one", Path({str(tmp_path)!r})))
held.__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == -9
    with claimed(job_named("one", tmp_path)):
        pass
