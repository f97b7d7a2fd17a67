"""Ranks started on this machine: one failure ends all, the first is told last, signals arrive, nobody is orphaned."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_LIMIT_S = 90.0  # of a whole program, most of it the import of torch; a busy machine takes long over it


def _start(name: str, world: int, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.ranks.launch.programs", name, str(world), str(folder)],
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _run(name: str, world: int, folder: Path) -> tuple[int, str, str, float]:
    """(exit code, stdout, stderr, seconds from the trouble to the end of all ranks, told)."""
    process = _start(name, world, folder)
    try:
        out, err = process.communicate(timeout=_LIMIT_S)
    finally:
        process.kill()
        process.communicate()
    trouble = folder / "failed"
    return process.returncode, out, err, _ended(folder) - trouble.stat().st_mtime if trouble.exists() else 0.0


def _stop(process: "subprocess.Popen[str]", folder: Path, *signals: signal.Signals) -> tuple[int, str, float]:
    """(exit code, stderr, seconds to the end of all ranks, told) of a launch that gets these signals."""
    begin = time.time()
    for number, each in enumerate(signals):
        time.sleep(0.1 * bool(number))  # two signals of one kind that are pending together are one signal
        process.send_signal(each)
    _, err = process.communicate(timeout=_LIMIT_S)
    return process.returncode, err, _ended(folder) - begin


def _ended(folder: Path) -> float:
    """When a launch was over. Not the end of its process: to tear down an interpreter with torch takes a busy machine
    ten seconds, and no rank has a part in it."""
    return (folder / "ended").stat().st_mtime


@pytest.fixture
def endless(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """A launch of two ranks that runs until it is stopped, and the ranks' process numbers."""
    process = _start(getattr(request, "param", "endless"), 2, tmp_path)
    try:
        yield process, [_pid(tmp_path / f"pid-{rank}") for rank in range(2)]
    finally:
        process.kill()
        process.communicate()


def _pid(file: Path) -> int:
    _await(lambda: file.exists() and bool(file.read_text()), _LIMIT_S)
    return int(file.read_text())


def _await(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_in_rank_order(tmp_path: Path) -> None:
    code, out, err, _ = _run("sums", 3, tmp_path)
    assert (code, out, err) == (0, "[6.0, 6.0, 6.0]\n", "")


@pytest.mark.parametrize("world", [2, 4])
def test_an_exception_is_the_last_thing_told(world: int, tmp_path: Path) -> None:
    code, _, err, seconds = _run("raises", world, tmp_path)
    assert code == 1
    assert err.endswith("\nrank 1 failed at step 7, in backward: ValueError: the seventh seal\nwas opened\n")
    assert "programs.py" in err
    assert "Connection closed" not in err
    assert seconds < 15


def test_a_users_mistake_has_no_traceback(tmp_path: Path) -> None:
    code, _, err, _ = _run("mistakes", 2, tmp_path)
    assert (code, err) == (1, "rank 1 failed at step 7, in backward: MistakeError: value 3; must be even\n")


def test_a_killed_rank_is_named_with_its_last_step(tmp_path: Path) -> None:
    code, _, err, seconds = _run("killed", 3, tmp_path)
    assert code == 1
    assert err == "rank 1 was killed by SIGKILL (the kernel does so when memory runs out) at step 7, in backward\n"
    assert seconds < 15


def test_an_exit_inside_a_rank_is_a_failure(tmp_path: Path) -> None:
    code, _, err, _ = _run("exits", 2, tmp_path)
    assert code == 1
    assert err.endswith("rank 1 failed at step 7, in backward: SystemExit: 3\n")


def test_a_rank_that_ignores_everything_is_ended(tmp_path: Path) -> None:
    code, _, err, seconds = _run("raises_beside_a_deaf_rank", 2, tmp_path)
    assert code == 1
    assert err.endswith("rank 1 failed at step 3, in forward: ValueError: nobody listens\n")
    assert seconds < 15


def test_a_rank_that_fails_before_the_others_join(tmp_path: Path) -> None:
    code, _, err, seconds = _run("raises_before_joining", 2, tmp_path)
    assert code == 1
    assert err.endswith("rank 0 failed: ValueError: too early\n")
    assert seconds < 15


def test_two_runs_at_once(tmp_path: Path) -> None:
    both = [_start("sums", 2, tmp_path) for _ in range(2)]
    try:
        assert [process.communicate(timeout=_LIMIT_S) for process in both] == [("[3.0, 3.0]\n", "")] * 2
    finally:
        for process in both:
            process.kill()
            process.communicate()


def test_sigint_ends_all(endless: tuple["subprocess.Popen[str]", list[int]], tmp_path: Path) -> None:
    process, pids = endless
    code, err, seconds = _stop(process, tmp_path, signal.SIGINT)
    assert (code, err) == (130, "stopped by SIGINT\n")
    assert seconds < 15
    assert not any(_runs(pid) for pid in pids)


def test_sigterm_ends_ranks_that_have_nothing_to_save(
    endless: tuple["subprocess.Popen[str]", list[int]], tmp_path: Path
) -> None:
    process, pids = endless
    code, err, seconds = _stop(process, tmp_path, signal.SIGTERM)
    assert (code, err) == (143, "stopped by SIGTERM\n")
    assert seconds < 15
    assert not any(_runs(pid) for pid in pids)


@pytest.mark.parametrize("endless", ["saves"], indirect=True)
def test_sigterm_waits_for_ranks_that_save(endless: tuple["subprocess.Popen[str]", list[int]], tmp_path: Path) -> None:
    process, _ = endless
    code, err, seconds = _stop(process, tmp_path, signal.SIGTERM)
    assert (code, err) == (143, "stopped by SIGTERM\n")
    assert seconds < 15
    assert [(tmp_path / f"saved-{rank}").exists() for rank in range(2)] == [True, True]


@pytest.mark.parametrize("endless", ["saves"], indirect=True)
def test_a_second_signal_means_now(endless: tuple["subprocess.Popen[str]", list[int]], tmp_path: Path) -> None:
    process, pids = endless
    code, _, seconds = _stop(process, tmp_path, signal.SIGTERM, signal.SIGTERM)
    assert code == 143
    assert seconds < 15
    assert not any(_runs(pid) for pid in pids)
    assert not (tmp_path / "saved-0").exists()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_no_rank_outlives_a_killed_parent(endless: tuple["subprocess.Popen[str]", list[int]]) -> None:
    process, pids = endless
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _await(lambda: not any(_runs(pid) for pid in pids), 5)


def test_a_stopped_rank_does_not_survive_the_failure_of_another(
    endless: tuple["subprocess.Popen[str]", list[int]], tmp_path: Path
) -> None:
    process, pids = endless
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    code, err, seconds = _stop(process, tmp_path)
    assert code == 1
    assert seconds < 15
    assert err.startswith("rank 1 was killed by SIGKILL")
    assert not any(_runs(pid) for pid in pids)
