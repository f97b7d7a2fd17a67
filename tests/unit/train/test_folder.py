"""A folder belongs to one run: what is found there decides, and nothing is ever mixed or lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.arch.resolve import arch_from_model
from meshwright.config.errors import RequestError
from meshwright.config.load import build_run
from meshwright.plan.resolve import resolve
from meshwright.testing.models import m0_bytes
from meshwright.train.folder import FolderState, Journal, check_output, folder_state, write_json
from meshwright.train.job import Job, job_of


@pytest.fixture
def job(tmp_path: Path) -> Job:
    run = build_run(m0_bytes(train={"steps": 3, "output": str(tmp_path)}))
    return job_of(run, resolve(run, arch_from_model(run.model)))


def write_steps(job: Job, count: int) -> None:
    with Journal.open(job) as journal:
        for step in range(count):
            journal.step([step], {"step": step, "loss": 1.0})
        journal.evaluation({"step": count - 1, "eval_loss": 1.0})


def test_an_absent_or_an_empty_folder_is_free(job: Job) -> None:
    assert folder_state(job) is FolderState.FREE
    job.folder.mkdir()
    assert folder_state(job) is FolderState.FREE


def test_this_run_finished_is_told_apart_from_this_run_cut_short(job: Job) -> None:
    write_steps(job, 3)
    assert folder_state(job) is FolderState.FINISHED
    with pytest.raises(RequestError, match="holds 3 of 5 steps of this run"):
        folder_state(replace(job, steps=5))


def test_another_run_is_refused_with_a_name_that_works(job: Job) -> None:
    write_steps(job, 3)
    other = replace(job, plan=replace(job.plan, seed=1))
    (job.folder.parent / "m0-2").mkdir()
    with pytest.raises(RequestError, match=r'holds another run.*name = "m0-3"'):
        folder_state(other)


def test_a_folder_of_something_else_is_refused(job: Job) -> None:
    job.folder.mkdir()
    (job.folder / "thesis.tex").write_text("x")
    with pytest.raises(RequestError, match="holds no run of this program"):
        folder_state(job)


def test_a_file_in_the_way_is_refused(job: Job) -> None:
    job.folder.write_text("x")
    with pytest.raises(RequestError, match="is a file"):
        folder_state(job)


def test_an_output_that_cannot_be_made_is_refused_by_its_key(job: Job, tmp_path: Path) -> None:
    """It was told as a fault of the token cache, the first that wrote there."""
    (tmp_path / "wall").write_text("x")
    output = tmp_path / "wall" / "runs"
    with pytest.raises(RequestError, match=f'train.output = "{output}": cannot be made: Not a directory; what works: '):
        check_output(replace(job, folder=output / "m0", cache=output / ".cache"))


def test_an_output_that_cannot_be_written_is_refused(job: Job, tmp_path: Path) -> None:
    (tmp_path / "wall").write_text("x")
    with (
        pytest.raises(RequestError, match="cannot be written"),
        Journal.open(replace(job, folder=tmp_path / "wall" / "m0")),
    ):
        pass


def test_lines_keep_full_precision_and_have_no_nan(job: Job) -> None:
    with Journal.open(job) as journal:
        journal.step([7], {"step": 0, "loss": 1 / 3, "grad_norm": float("nan")})
        written = (job.folder / "metrics.jsonl").read_text()  # before the file is closed
    assert json.loads(written) == {"step": 0, "loss": 1 / 3, "grad_norm": None}
    assert json.loads((job.folder / "data.jsonl").read_text()) == {"step": 0, "samples": [7]}


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "ledger.json"
    write_json(file, {"a": [float("inf"), 1]})
    assert json.loads(file.read_text()) == {"a": [None, 1]}
    assert [each.name for each in tmp_path.iterdir()] == ["ledger.json"]
