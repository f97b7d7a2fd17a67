"""A run that was stopped and started again is the run that never stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.errors import CheckpointError
from meshwright.checkpoint.folder import Folder
from meshwright.config.choices import Resume
from meshwright.config.errors import RequestError
from meshwright.launch.status import RankStatus
from meshwright.testing.ranks import run_cases
from meshwright.train.feed import open_corpus
from meshwright.train.job import Job, Saving
from meshwright.train.loop import train_joined
from meshwright.train.outcome import Outcome
from meshwright.train.start import is_finished
from tests.ranks.train.jobs import lines, steps, tiny_job

STEPS = 6


def job_of(folder: Path, name: str, world: int = 1, every: int = 2, **sections: dict[str, Any]) -> Job:
    checkpoint = {"every": every, "keep": 9, **sections.pop("checkpoint", {})}
    model = {"dropout": 0.1, **sections.pop("model", {})}
    return tiny_job(folder, world, name, checkpoint=checkpoint, model=model, **sections)


def cut_short(job: Job, step: int) -> Job:
    """Leave the folder as a crash after the save of `step` and before the next would."""
    folder = Folder(job.folder)
    for later in folder.steps():
        if later > step:
            folder.storage.remove_folder(folder.path(later))
    return job


def trained(rank: int, job: Job) -> Outcome:
    return train_joined(RankStatus(), job)


def same(one: Job, other: Job, equal: Callable[[float, float], bool] = lambda a, b: a == b) -> None:
    """Losses, learning rates and samples of all steps."""
    assert lines(one, "data.jsonl") == lines(other, "data.jsonl")
    assert [line["step"] for line in steps(other)] == list(range(STEPS))
    for a, b in zip(steps(one), steps(other), strict=True):
        assert (a["step"], a["learning_rate"], a["tokens"]) == (b["step"], b["learning_rate"], b["tokens"])
        assert equal(a["loss"], b["loss"]), (a, b)


def test_a_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    """Stopped twice within an epoch: losses, learning rates, dropout, sample ids, the final weights."""
    whole, broken = job_of(tmp_path, "whole"), job_of(tmp_path, "broken")
    before = torch.get_rng_state()
    for job in (whole, broken):
        trained(0, job)
    assert torch.equal(torch.get_rng_state(), before)
    for stop in (2, 4, 4):
        cut_short(broken, stop)
        with (broken.folder / "metrics.jsonl").open("a") as torn:
            torn.write('{"step": 5, "los')
        assert trained(0, broken).steps == STEPS
        same(whole, broken)
    ends = [Folder(job.folder).manifest(STEPS) for job in (whole, broken)]
    assert [t.fingerprint for t in ends[0].tensors] == [t.fingerprint for t in ends[1].tensors]
    assert [ends[0].samples, ends[0].updates] == [STEPS * 8, STEPS]
    assert is_finished(broken)
    assert trained(0, broken).already


def test_another_layout_continues_within_rounding(tmp_path: Path) -> None:
    saved = job_of(tmp_path, "one")
    trained(0, saved)
    cases = []
    for name, sections in {
        "dp2": {},
        "zero3": {"parallel": {"zero": 3}},
        "asynchronous": {"checkpoint": {"asynchronous": False}},
        "tp2": {"mesh": {"dp": 1, "tp": 2}},
        "pp2": {"mesh": {"dp": 1, "pp": 2}},
    }.items():
        job = job_of(tmp_path, name, 2, **sections)
        job = replace(job, saving=replace(job.saving, resume=str(saved.folder / "checkpoints" / "step-00000002")))
        cases.append(job)
    run_cases(trained, 2, cases, timeout=200)
    for job in cases:
        got, wanted = steps(job), steps(saved)[2:]
        assert [line["step"] for line in got] == [line["step"] for line in wanted]
        assert lines(job, "data.jsonl") == lines(saved, "data.jsonl")[2:]
        for a, b in zip(got, wanted, strict=True):
            assert abs(a["loss"] - b["loss"]) <= 1e-12 * abs(b["loss"]), job.plan.name
            assert a["learning_rate"] == b["learning_rate"], job.plan.name


def test_differences_are_told_field_by_field_and_accepted_on_demand(tmp_path: Path) -> None:
    trained(0, job_of(tmp_path, "run"))
    cut_short(job_of(tmp_path, "run"), 2)
    changed = job_of(tmp_path, "run", optimizer={"learning_rate": 1e-3}, batch={"global": 4})
    with pytest.raises(RequestError) as caught:
        is_finished(changed)
    for told in (
        "optimizer.learning_rate: 0.003 -> 0.001",
        "batch.global: 8 -> 4",
        "checkpoint.accept_changes=true",
    ):
        assert told in str(caught.value)
    accepted = replace(changed, saving=replace(changed.saving, accept_changes=True))
    trained(0, accepted)
    taken = [sample for line in lines(accepted, "data.jsonl") for sample in line["samples"]]
    order = open_corpus(accepted).sample_ids(accepted.plan.seed, 0, len(taken)).tolist()
    assert len(taken) == 2 * 8 + 4 * 4
    assert taken == order  # no sample twice, none left out, although the batch changed


def test_another_text_is_noticed(tmp_path: Path) -> None:
    job = job_of(tmp_path, "run")
    trained(0, job)
    with pytest.raises(RequestError, match="the text itself: digest"):
        is_finished(job, "another digest")
    source = Path(job.plan.data.source)
    source.write_text("another text altogether\n" * 900)
    with pytest.raises(RequestError, match="the text itself: digest"):
        trained(0, job)  # under a launcher nobody has compared before: done already, it said
    source.unlink()  # what is finished needs it no more
    assert trained(0, job).already


def test_a_folder_without_a_usable_checkpoint_is_never_started_anew(tmp_path: Path) -> None:
    job = job_of(tmp_path, "run")
    trained(0, job)
    (job.folder / "latest").unlink()  # the tracker is a hint
    assert is_finished(job)
    for step in Folder(job.folder).steps():
        (job.folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    with pytest.raises(RequestError, match=r"(?s)none can be used.*has no manifest"):
        is_finished(job)
    with pytest.raises(RequestError, match="none can be used"):
        trained(0, job)
    afresh = replace(job, saving=replace(job.saving, resume=Resume.NONE))
    assert trained(0, afresh).steps == STEPS
    assert (job.folder / "checkpoints.before-1").is_dir()
    assert Folder(job.folder).steps() == [6, 4, 2]


def test_a_damaged_checkpoint_is_told_and_the_one_before_taken(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    whole, job = job_of(tmp_path, "whole"), job_of(tmp_path, "run")
    for each in (whole, job):
        trained(0, each)
    cut_short(job, 4)
    file = job.folder / "checkpoints" / "step-00000004" / "data-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    capsys.readouterr()
    trained(0, job)
    told = capsys.readouterr().out
    assert "damaged: " in told
    assert "step-00000004/data-00000.safetensors: bytes" in told
    assert "resumed from" in told
    assert "step-00000002: step 2, 16 samples" in told
    same(whole, job)
    with pytest.raises(CheckpointError, match="holding exp_avg_sq"):
        trained(0, replace(job, folder=tmp_path / "other", saving=Saving(resume=str(_damaged(job)))))


def _damaged(job: Job) -> Path:
    """A step folder with a flipped bit at its end."""
    folder = job.folder / "checkpoints" / "step-00000004"
    file = folder / "data-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 128
    file.write_bytes(data)
    return folder


def test_a_run_trains_from_imported_weights(tmp_path: Path) -> None:
    """Export after 6 steps; the run that starts from these weights has the loss that evaluation gave them."""
    from meshwright.checkpoint.huggingface.convert import export_checkpoint

    first = job_of(tmp_path, "first", model={"dropout": 0.0})
    trained(0, first)
    folder = Folder(first.folder)
    export_checkpoint(folder.storage, folder.path(STEPS), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["vocab_size"] == 257
    sizes = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"))
    model = {"family": None, "hf": str(tmp_path / "hf"), "weights": "load", **sizes}
    one = tiny_job(tmp_path, 1, "from-1", model=model)
    two = tiny_job(tmp_path, 2, "from-2", model=model, parallel={"zero": 3})
    trained(0, one)
    run_cases(trained, 2, [two], timeout=100)
    for a, b in zip(steps(one), steps(two), strict=True):
        assert abs(a["loss"] - b["loss"]) <= 1e-12 * abs(b["loss"])
    assert steps(one)[0]["loss"] < steps(first)[0]["loss"] - 0.5
