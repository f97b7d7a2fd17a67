"""The one JSON object of `train --json`, however the run ended."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.arch.resolve import arch_from_model
from meshwright.cli.ending import Ending
from meshwright.config.load import build_run
from meshwright.launch.local import InterruptedRanksError, LaunchError, exit_code
from meshwright.launch.report import Failure
from meshwright.plan.resolve import resolve
from meshwright.testing.models import m0_bytes
from meshwright.train.job import Job, job_of
from meshwright.train.outcome import Outcome

OUTCOME = Outcome(steps=6, first_loss=5.5, last_loss=math.nan, eval_loss=4.5, step_seconds=0.5, traffic_equal=True)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    run = build_run(m0_bytes(train={"steps": 6, "output": str(tmp_path)}))
    return job_of(run, resolve(run, arch_from_model(run.model)), quiet_stdout=True)


def raises(error: BaseException) -> Callable[[], list[Any]]:
    def run() -> list[Any]:
        raise error

    return run


ENDINGS: dict[str, tuple[Callable[[], list[Any]], int, dict[str, Any]]] = {
    "done": (
        lambda: [OUTCOME, OUTCOME], 0,
        {"status": "done", "signal": None, "steps": 6, "last_loss": None, "eval_loss": 4.5, "already": False},
    ),
    "saved before the end": (
        raises(InterruptedRanksError(signal.SIGTERM, [replace(OUTCOME, stopped=True)], None)), 143,
        {"status": "stopped", "signal": "SIGTERM", "steps": 6, "first_loss": 5.5},
    ),
    "asked in the last step": (
        raises(InterruptedRanksError(signal.SIGTERM, [OUTCOME], None)), 143,
        {"status": "done", "signal": "SIGTERM", "steps": 6},
    ),
    "at once": (
        raises(InterruptedRanksError(signal.SIGINT, (), 12)), 130,
        {"status": "stopped", "signal": "SIGINT", "steps": 12},
    ),
    "before the first step": (
        raises(InterruptedRanksError(signal.SIGINT)), 130, {"status": "stopped", "signal": "SIGINT", "steps": None},
    ),
    "failed": (
        raises(LaunchError(Failure(1, 0.0, "ValueError", "no", 3, "forward"))), 1,
        {"status": "failed", "steps": 3, "error": "rank 1 failed at step 3, in forward: ValueError: no"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
def test_one_object_whatever_happened(name: str, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    run, code, wanted = ENDINGS[name]
    ending = Ending(job)
    assert exit_code(ending.of(run)) == code
    told = json.loads(capsys.readouterr().out)
    assert told.items() >= {**wanted, "name": job.plan.name, "folder": str(job.folder), "plan": job.plan.hash}.items()
    assert ending.stopped is (name == "saved before the end")


def test_a_rank_that_a_launcher_started_tells_an_interrupt(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        Ending(job).of(raises(KeyboardInterrupt()))()
    assert json.loads(capsys.readouterr().out)["signal"] == "SIGINT"


def test_a_finished_run_is_an_object_too(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    Ending(job).already()
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["status"], told["already"], told["steps"]) == ("done", True, job.steps)
    assert err == f"{job.folder} holds this run, finished: nothing to do\n"


@pytest.mark.parametrize("silent", [False, True])
def test_one_rank_of_a_launcher_tells_a_finished_run(
    silent: bool, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """None did."""
    asked = replace(job, quiet_stdout=False)
    Ending(asked, silent).of(lambda: [replace(OUTCOME, already=True)])()
    assert capsys.readouterr() == ("", "" if silent else f"{job.folder} holds this run, finished: nothing to do\n")


def test_refusals_people_and_other_ranks_get_none(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    refused = LaunchError(Failure(0, 0.0, "RequestError", "mesh.dp = 3", refused=True))
    assert exit_code(Ending(job).of(raises(refused))) == 2
    assert exit_code(Ending(job, silent=True).of(lambda: [OUTCOME])) == 0
    assert exit_code(Ending(replace(job, quiet_stdout=False)).of(lambda: [OUTCOME])) == 0
    assert capsys.readouterr().out == ""
