"""A save that fails costs no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.arch.resolve import arch_from_model
from meshwright.checkpoint.errors import SaveError
from meshwright.checkpoint.folder import Folder
from meshwright.checkpoint.storage import Local
from meshwright.comm.agree import Side
from meshwright.config.load import build_run
from meshwright.plan.resolve import resolve
from meshwright.testing.models import m0_bytes
from meshwright.train.job import Job, job_of
from meshwright.train.saves import Saves
from tests.unit.checkpoint.saved import engine_of


def job_of_four_steps(place: Path, asynchronous: bool) -> Job:
    run = build_run(m0_bytes(train={"steps": 4, "output": str(place)}))
    job = job_of(run, resolve(run, arch_from_model(run.model)))
    return replace(job, saving=replace(job.saving, every=1, keep=9, asynchronous=asynchronous))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_fails_one_save_and_not_the_next(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An asynchronous failure surfaced in place of the next save, which was not even tried."""
    job, told = job_of_four_steps(tmp_path, asynchronous), list[str]()
    with Saves(engine_of(0), job, Side(), "", told.append) as saves:
        for done in range(1, 5):
            with monkeypatch.context() as patch:
                if done == 2:
                    patch.setattr(Local, "free_bytes", lambda self: 0)
                saves.after(done, done, stopping=False)
                if done == 2 and asynchronous:
                    saves._saver._thread.join()  # while the disk is still full
    assert Folder(job.checkpoints).steps() == [4, 3, 1]
    assert [line.split(":")[0] for line in told if "not saved" in line] == ["warning"]
    assert "step 2 was not saved: disk full" in "".join(told)


def test_the_last_save_may_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of_four_steps(tmp_path, asynchronous=True)
    monkeypatch.setattr(Local, "free_bytes", lambda self: 0)
    with (
        pytest.raises(SaveError, match="step 4 was not saved: disk full"),
        Saves(engine_of(0), job, Side(), "", lambda line: None) as saves,
    ):
        saves.after(4, 4, stopping=False)
