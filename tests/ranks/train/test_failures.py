"""What ends a run: a gradient that is not finite, a rank that raises, a signal. Nobody is left waiting."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.folder import Folder
from meshwright.checkpoint.saver import Saver
from meshwright.config.choices import OnNonfinite
from meshwright.launch.local import exit_code, run_ranks
from meshwright.launch.status import RankStatus
from meshwright.model.decoder import Head
from meshwright.optim import update
from meshwright.parallel.engine import Engine
from meshwright.testing.models import m0_bytes, overrides
from meshwright.testing.ranks import run, run_cases
from meshwright.train.feed import Feed
from meshwright.train.job import Job
from meshwright.train.loop import train, train_joined
from meshwright.train.nonfinite import NonfiniteError
from tests.ranks.train.jobs import TEXT, steps, tiny_job

LIMIT_S = 15  # from the fault to the end of every rank

# ------------------------------------------------------------------ gradients that are not finite


def spoilt(rank: int, job: Job) -> tuple[str, list[float]]:
    """Train with a loss that is NaN on rank 1 at step 2; the error's text, and sums of the weights before and after."""
    weights: list[float] = []
    plain_loss, plain_step = Head.loss, Engine.step

    def loss(self: Head, x: torch.Tensor, rows: Any, labels: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        found = plain_loss(self, x, rows, labels, count)
        return found * float("nan") if rank == 1 and int(rows.step) == 2 else found

    def step(self: Engine, *arguments: Any) -> Any:
        result = plain_step(self, *arguments)
        weights.append(sum(float(store.whole.sum()) for store in self.stores))
        return result

    Head.loss, Engine.step = loss, step  # type: ignore[method-assign]
    try:
        train_joined(RankStatus(), job)
        told = ""
    except NonfiniteError as error:
        told = str(error)
    finally:
        Head.loss, Engine.step = plain_loss, plain_step  # type: ignore[method-assign]
    return told, weights


MESHES: dict[str, dict[str, Any]] = {"replicas": {"dp": 2}, "stages": {"dp": 1, "pp": 2}}


def test_stop_names_rank_step_and_tensor_and_touches_no_weight(tmp_path: Path) -> None:
    """B22: a NaN of one rank used to spread to all weights, and the run ended as a success. Of two stages the last one
    is to blame, though the other's gradients come from it and are no better."""
    jobs = [tiny_job(tmp_path, 2, name, mesh=mesh, precision={"compute": "float32"}) for name, mesh in MESHES.items()]
    here, there = run_cases(spoilt, 2, jobs)
    for job, told in zip(jobs, zip(here, there, strict=True), strict=True):
        culprit, other = told[1][0], told[0][0]
        assert "the gradient of head.weight is the first that is not finite, on rank 1" in culprit
        assert ("(and on rank 0)" in culprit) is (job.plan.degrees.pp == 2)
        assert "before step 2" in culprit
        assert other == f"stopped because of rank 1: {culprit}"
        for _, weights in told:
            assert weights[2:] == [weights[1]] * 2  # the refused step, and the second look at it
        assert [line["loss"] for line in steps(job)][2] is None
        assert len(steps(job)) == 3
    assert here[0][1] == there[0][1]


def test_skip_goes_on_with_equal_weights(tmp_path: Path) -> None:
    job = replace(tiny_job(tmp_path, 2), on_nonfinite=OnNonfinite.SKIP)
    told = run(spoilt, 2, job)
    assert [text for text, _ in told] == ["", ""]
    assert told[0][1] == told[1][1]
    weights = told[0][1]
    assert weights[1] == weights[2] == weights[3] != weights[4]
    losses = [line["loss"] for line in steps(job)]
    assert losses[2] is None
    assert all(loss is not None for place, loss in enumerate(losses) if place != 2)


# ------------------------------------------------------------------ a rank that raises


def _at_step_3(call: Callable[..., Any], step: Callable[[Any], int], mark: Path) -> Callable[..., Any]:
    """`call` until step 3, then an error; `mark` is touched when it is raised."""

    def raising(*arguments: Any) -> Any:
        if step(arguments) == 3:
            mark.touch()
            raise ZeroDivisionError("the fault of the test")
        return call(*arguments)

    return raising


def faulty(place: Any, status: RankStatus, job: Job, where: str, mark: Path) -> None:
    if place.rank == 1:
        if where == "data":
            Feed.batch = _at_step_3(Feed.batch, lambda arguments: arguments[1], mark)  # type: ignore[method-assign]
        elif where == "forward":
            Head.loss = _at_step_3(  # type: ignore[method-assign]
                Head.loss, lambda arguments: int(arguments[2].step), mark
            )
        elif where == "backward":
            plain = Head.loss

            def loss(self: Head, x: torch.Tensor, rows: Any, *rest: Any) -> torch.Tensor:
                if x.requires_grad:
                    x.register_hook(_at_step_3(lambda gradient: gradient, lambda _: int(rows.step), mark))
                return plain(self, x, rows, *rest)

            Head.loss = loss  # type: ignore[method-assign]
        elif where == "optimizer":
            for kind, rule in update.RULES.items():
                update.RULES[kind] = _at_step_3(rule, lambda arguments: int(arguments[1][0].step), mark)
        elif where == "save":
            Saver.save = _at_step_3(  # type: ignore[method-assign]
                Saver.save, lambda arguments: arguments[1].step - 1, mark
            )
    train(place, status, job)


DOING = {
    "data": "reading the batch",
    "forward": "forward of micro-batch 0, head",
    "backward": "backward of micro-batch 0, head",
    "optimizer": "update of bucket 0, embedding",
    "save": "saving a checkpoint",
}
QUICK = {("data", 2), ("optimizer", 2), ("backward", 4), ("save", 4)}
"""The others are proved: every place on both numbers of ranks."""


@pytest.mark.parametrize(
    ("where", "world"),
    [
        pytest.param(where, world, marks=() if (where, world) in QUICK else pytest.mark.prove)
        for where in DOING
        for world in (2, 4)
    ],
)
def test_one_rank_raises_and_all_end(tmp_path: Path, capfd: pytest.CaptureFixture[str], where: str, world: int) -> None:
    """B98: the parent fails, the first error is the last thing told, and nothing that was begun counts as saved."""
    job, mark = tiny_job(tmp_path, world, checkpoint={"every": 4}), tmp_path / "raised"
    assert exit_code(lambda: run_ranks(faulty, world, job, where, mark)) == 1
    assert time.time() - mark.stat().st_mtime < LIMIT_S
    assert not Folder(job.folder).steps()
    told = capfd.readouterr().err.splitlines()
    first = f"rank 1 failed at step 3, in {DOING[where]}: ZeroDivisionError: the fault of the test"
    *_, last = (place for place, line in enumerate(told) if line == first)
    assert all(line.startswith("rank 1, stage 0 of 1, action ") for line in told[last + 1 :])  # its note
    assert "Traceback" in "".join(told[:last])


# ------------------------------------------------------------------ the command


def _command(folder: Path, **sections: Any) -> list[str]:
    source = folder / "corpus.txt"
    source.write_text(TEXT)
    tables = m0_bytes(
        **{
            "data": {"source": str(source), "eval_fraction": 0.05},
            "mesh": {"dp": 2},
            "batch": {"global": 8, "micro": 1},
            **sections,
            "train": {"output": str(folder), "device": "cpu", "eval_every": 0, **sections.get("train", {})},
        }
    )
    return [sys.executable, "-m", "meshwright", "train", *overrides(tables)]


def test_the_first_error_is_the_last_line(tmp_path: Path) -> None:
    """A rate that destroys the weights: an honest way to gradients that are not finite."""
    command = _command(tmp_path, optimizer={"learning_rate": 1e30, "schedule": "constant", "warmup_steps": 0})
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("rank ")
    assert "in the check of gradients: NonfiniteError: " in last
    assert "weights are those before step" in last
    metrics = [json.loads(line) for line in (tmp_path / "m0" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["grad_norm"] is None


def _stopped(folder: Path, signum: signal.Signals) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `train --json` that gets a signal in its sixth step."""
    process = subprocess.Popen(
        [*_command(folder, train={"steps": 100_000}), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step") and line.split()[1].startswith("5/"):
                break
        process.send_signal(signum)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


def test_sigterm_ends_after_the_step_with_143(tmp_path: Path) -> None:
    code, out, err = _stopped(tmp_path, signal.SIGTERM)
    assert code == 143, err
    assert err.splitlines()[-1] == "stopped by SIGTERM"
    assert "stopped after" in err
    metrics = [json.loads(line) for line in (tmp_path / "m0" / "metrics.jsonl").read_text().splitlines()]
    samples = (tmp_path / "m0" / "data.jsonl").read_text().splitlines()
    assert [line["step"] for line in metrics] == list(range(len(samples)))
    assert Folder(tmp_path / "m0").steps() == [len(samples)]  # saved before the end
    told = json.loads(out)
    assert (told["status"], told["signal"], told["stopped"]) == ("stopped", "SIGTERM", True)
    assert (told["steps"], told["last_loss"]) == (len(samples), metrics[-1]["loss"])


@pytest.mark.prove
def test_sigint_ends_at_once_with_130(tmp_path: Path) -> None:
    code, out, err = _stopped(tmp_path, signal.SIGINT)
    assert code == 130, err
    assert err.splitlines()[-1] == "stopped by SIGINT"
    told = json.loads(out)
    assert (told["status"], told["signal"]) == ("stopped", "SIGINT")
    assert 6 <= told["steps"] <= len((tmp_path / "m0" / "metrics.jsonl").read_text().splitlines())
