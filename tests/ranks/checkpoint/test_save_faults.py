"""What one rank suffers in the middle of a save all ranks know: a death, a full disk."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.checkpoint.check import check_checkpoint
from meshwright.checkpoint.errors import SaveError
from meshwright.checkpoint.folder import Folder, find_checkpoint
from meshwright.checkpoint.saver import Progress, Saver
from meshwright.checkpoint.storage import Local, Writing
from meshwright.comm.agree import Side
from meshwright.launch.forkserver import start_server
from meshwright.launch.join import join_file
from meshwright.launch.rank import prepare
from meshwright.launch.status import RankStatus
from meshwright.testing.ranks import run, run_cases
from meshwright.train.job import Job
from meshwright.train.loop import train_joined
from tests.ranks.checkpoint.layouts import LAYOUTS, engine_of
from tests.ranks.train.jobs import steps, tiny_job

LAYOUT = next(layout for layout in LAYOUTS if layout.name == "dp 2, ZeRO 3")
POINTS = ("create", "write", "flush")
"""Steps of rank 1's file: what comes before and after is rank 0's, whose death is the crash of a whole save."""


def save(root: Path, step: int, asynchronous: bool, at: Callable[[str], None]) -> str:
    """Save as a rank of two; what the failure says."""
    saver = Saver(engine_of(LAYOUT), Folder(root, at), asynchronous=asynchronous, side=Side(), block_bytes=4096)
    try:
        saver.save(Progress(step, step * 12))
        saver.wait()
    except SaveError as error:
        return str(error)
    return ""


# ---------------------------------------------------------------------- a death


def doomed(rank: int, root: Path, point: str, asynchronous: bool) -> None:
    """Rank 1 kills itself at a point of the second save; rank 0 writes down what it hears, and when."""

    def at(step: str) -> None:
        if rank == 1 and step.startswith(point) and "data-00001" in step:
            (root / "killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    prepare(num_threads=1)
    join_file(root / "store", rank, 2)
    assert save(root / "run", 1, asynchronous, lambda step: None) == ""
    told = save(root / "run", 2, asynchronous, at)
    (root / f"told-{rank}").write_text(f"{time.monotonic()}\n{told}")
    os._exit(0)  # a group whose member is dead is not destroyed


@pytest.mark.parametrize(("point", "asynchronous"), [("create", True), ("write", False), ("flush", True)])
def test_a_rank_that_is_killed_fails_the_save_of_the_other(point: str, asynchronous: bool, tmp_path: Path) -> None:
    """Within seconds, by an error of its own, and the checkpoint before is what `latest` and a start find."""
    start_server(("meshwright.testing.ranks",))
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=doomed, args=(rank, tmp_path, point, asynchronous)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode is not None, "a rank hangs"
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL]
    when, _, told = (tmp_path / "told-0").read_text().partition("\n")
    assert re.match(r"step 2 was not saved: another rank is gone: ", told), told
    assert float(when) - float((tmp_path / "killed").read_text()) < 10
    root = tmp_path / "run"
    for address in (root, root / "latest"):
        checked = check_checkpoint(*find_checkpoint(address))
        assert checked.manifest is not None
        assert (checked.manifest.step, checked.problems) == (1, ())
    told_at_start = Folder(root).clean()
    assert len(told_at_start) == 1
    assert "left by a save that did not end" in told_at_start[0]
    assert os.listdir(root / "checkpoints") == ["step-00000001"]


# ---------------------------------------------------------------------- a full disk


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "data")


def on_a_full_disk(rank: int, root: Path) -> list[str]:
    """Every point of rank 1's file, sync and async: what this rank hears of each."""
    assert save(root, 1, False, lambda step: None) == ""
    told = []
    for asynchronous in (False, True):
        for point in POINTS:

            def at(step: str, point: str = point) -> None:
                if rank == 1 and step.startswith(point) and "data-00001" in step:
                    raise full()

            told.append(save(root, 2, asynchronous, at))
    told.append(save(root, 3, True, lambda step: None))
    return told


def test_a_disk_that_is_full_for_one_rank_is_full_for_all(tmp_path: Path) -> None:
    zero, one = run(on_a_full_disk, 2, tmp_path)
    assert zero == one
    wanted = r"step 2 was not saved: rank 1: disk full: a checkpoint needs [\d,]+ bytes, [\d,]+ are free at .*"
    assert all(re.fullmatch(wanted, told) for told in zero[:-1]), zero
    assert zero[-1] == ""
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000001", "step-00000003"]
    for step in (1, 3):
        assert check_checkpoint(*find_checkpoint(tmp_path / Folder(tmp_path).path(step))).problems == ()


def trained(rank: int, case: tuple[Job, int]) -> str:
    """Train while rank 1 cannot write the checkpoint after some steps; what ended the run."""
    job, full_at = case
    create = Local.create

    def refused(self: Local, path: str) -> Writing:
        if rank == 1 and f"step-{full_at:08d}" in path:
            raise full()
        return create(self, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Local, "create", refused)
        try:
            train_joined(RankStatus(), job)
        except SaveError as error:
            return str(error)
    return ""


def test_training_goes_on_without_a_checkpoint_and_fails_without_the_last(tmp_path: Path) -> None:
    keys = {"checkpoint": {"every": 2, "keep": 9}, "parallel": {"zero": 1}}  # so that rank 1 has something to write
    jobs = [tiny_job(tmp_path, 2, name, **keys) for name in ("middle", "last")]
    ended = run_cases(trained, 2, [(job, at) for job, at in zip(jobs, (4, 6), strict=True)], timeout=100)
    assert ended[0] == ended[1]
    middle, last = ended[0]
    assert middle == ""
    assert re.match("step 6 was not saved: rank 1: disk full: a checkpoint needs", last)
    assert [Folder(job.folder).steps() for job in jobs] == [[6, 2], [4, 2]]
    assert [len(steps(job)) for job in jobs] == [6, 6]
