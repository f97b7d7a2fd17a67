"""What the watch makes of ranks that come and go, also between two of its looks."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.launch.report import Failure, to_json
from meshwright.launch.watch import GRACE_S, Watch


def _ended() -> int:
    """The number of a process that is gone."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path, 2, 10.0)


def test_a_rank_that_ended_well_between_two_looks_is_no_failure(tmp_path: Path, watch: Watch) -> None:
    """A short run on a busy machine was told to have failed."""
    (tmp_path / "rank-0.pid").write_text(str(_ended()))
    (tmp_path / "rank-0.done").write_text("")
    watch._look(time.monotonic())
    assert watch.failures() == []
    assert watch._kill_at is None


def test_a_rank_that_failed_between_two_looks_ends_the_others(tmp_path: Path, watch: Watch) -> None:
    """The others were left to the elastic agent, which waits half a minute for them."""
    failure = Failure(1, 5.0, "ValueError", "nobody listens")
    (tmp_path / "rank-0.pid").write_text(str(os.getpid()))
    (tmp_path / "rank-1.pid").write_text(str(_ended()))
    (tmp_path / "rank-1.error").write_text(to_json(failure))
    watch._look(100.0)
    assert watch.failures() == [failure]
    assert watch._kill_at == 100.0 + GRACE_S


def test_a_rank_that_died_between_two_looks_is_told_once(tmp_path: Path, watch: Watch) -> None:
    (tmp_path / "rank-1.pid").write_text(str(_ended()))
    watch._look(100.0)
    watch._look(101.0)
    assert [(failure.rank, failure.kind, failure.at) for failure in watch.failures()] == [(1, "", 100.0)]
    assert watch._kill_at == 100.0 + GRACE_S
