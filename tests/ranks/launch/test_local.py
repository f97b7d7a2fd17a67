"""Ranks started on this machine: one failure ends all, the first is told last, signals arrive, nobody is orphaned."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

_ROOT = Path(__file__).parents[3]
_LIMIT_S = 90.0  # of a whole program, most of it the import of torch; a busy machine takes long over it


LAUNCHES = (("sums", 3), ("raises", 2), ("raises", 4), ("mistakes", 2), ("killed", 3), ("exits", 2),
            ("raises_beside_a_deaf_rank", 2), ("raises_before_joining", 2))  # fmt: skip


Endless = tuple["subprocess.Popen[str]", Path, list[int]]


class Launched(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float
    """From the trouble to the end of all ranks, told."""


def _start(folder: Path, *launches: tuple[str, int]) -> "subprocess.Popen[str]":
    words = [str(word) for launch in launches for word in launch]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.ranks.launch.programs", str(folder), *words],
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _read(folder: Path) -> Launched:
    trouble, ended = folder / "failed", (folder / "ended").stat().st_mtime
    code, out, err = ((folder / name).read_text() for name in ("code", "out", "err"))
    return Launched(int(code), out, err, ended - trouble.stat().st_mtime if trouble.exists() else 0.0)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Launched]:
    """What came of all launches, made by one process: torch is imported once."""
    folder = tmp_path_factory.mktemp("launches")
    process = _start(folder, *LAUNCHES)
    try:
        stray, _ = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        hung = next(launch for launch in LAUNCHES if not (folder / "{}-{}".format(*launch) / "ended").exists())
        pytest.fail(f"{hung} and those before it took more than {_LIMIT_S} s")
    finally:
        process.kill()
        process.communicate()
    assert stray == ""
    return {(name, world): _read(folder / f"{name}-{world}") for name, world in LAUNCHES}


def _stop(process: "subprocess.Popen[str]", folder: Path, *signals: signal.Signals) -> tuple[int, str, float]:
    """(exit code, stderr, seconds to the end of all ranks, told) of a launch that gets these signals."""
    begin = time.time()
    for number, each in enumerate(signals):
        time.sleep(0.1 * bool(number))  # two signals of one kind that are pending together are one signal
        process.send_signal(each)
    process.communicate(timeout=_LIMIT_S)
    return process.returncode, (folder / "err").read_text(), (folder / "ended").stat().st_mtime - begin


@pytest.fixture
def endless(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Endless]:
    """A launch of two ranks that runs until it is stopped, its folder, and the ranks' process numbers."""
    name = getattr(request, "param", "endless")
    process, folder = _start(tmp_path, (name, 2)), tmp_path / f"{name}-2"
    try:
        yield process, folder, [_pid(folder / f"pid-{rank}") for rank in range(2)]
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


def test_results_in_rank_order(launched: dict[tuple[str, int], Launched]) -> None:
    code, out, err, _ = launched["sums", 3]
    assert (code, out, err) == (0, "[6.0, 6.0, 6.0]\n", "")


@pytest.mark.parametrize("world", [2, 4])
def test_an_exception_is_the_last_thing_told(world: int, launched: dict[tuple[str, int], Launched]) -> None:
    code, _, err, seconds = launched["raises", world]
    assert code == 1
    assert err.endswith("\nrank 1 failed at step 7, in backward: ValueError: the seventh seal\nwas opened\n")
    assert "calls.py" in err
    assert "Connection closed" not in err
    assert seconds < 15


def test_a_users_mistake_has_no_traceback(launched: dict[tuple[str, int], Launched]) -> None:
    code, _, err, _ = launched["mistakes", 2]
    assert (code, err) == (1, "rank 1 failed at step 7, in backward: MistakeError: value 3; must be even\n")


def test_a_killed_rank_is_named_with_its_last_step(launched: dict[tuple[str, int], Launched]) -> None:
    code, _, err, seconds = launched["killed", 3]
    assert code == 1
    assert err == "rank 1 was killed by SIGKILL (the kernel does so when memory runs out) at step 7, in backward\n"
    assert seconds < 15


def test_an_exit_inside_a_rank_is_a_failure(launched: dict[tuple[str, int], Launched]) -> None:
    code, _, err, _ = launched["exits", 2]
    assert code == 1
    assert err.endswith("rank 1 failed at step 7, in backward: SystemExit: 3\n")


def test_a_rank_that_ignores_everything_is_ended(launched: dict[tuple[str, int], Launched]) -> None:
    code, _, err, seconds = launched["raises_beside_a_deaf_rank", 2]
    assert code == 1
    assert err.endswith("rank 1 failed at step 3, in forward: ValueError: nobody listens\n")
    assert seconds < 15


def test_a_rank_that_fails_before_the_others_join(launched: dict[tuple[str, int], Launched]) -> None:
    code, _, err, seconds = launched["raises_before_joining", 2]
    assert code == 1
    assert err.endswith("rank 0 failed: ValueError: too early\n")
    assert seconds < 15


def test_two_runs_at_once(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    both = [_start(folder, ("sums", 2)) for folder in folders]
    try:
        assert [process.communicate(timeout=_LIMIT_S) for process in both] == [("", None)] * 2
        assert [_read(folder / "sums-2")[:3] for folder in folders] == [(0, "[3.0, 3.0]\n", "")] * 2
    finally:
        for process in both:
            process.kill()
            process.communicate()


def test_sigint_ends_all(endless: Endless) -> None:
    process, folder, pids = endless
    code, err, seconds = _stop(process, folder, signal.SIGINT)
    assert (code, err) == (130, "stopped by SIGINT\n")
    assert seconds < 15
    assert not any(_runs(pid) for pid in pids)


def test_sigterm_ends_ranks_that_have_nothing_to_save(endless: Endless) -> None:
    process, folder, pids = endless
    code, err, seconds = _stop(process, folder, signal.SIGTERM)
    assert (code, err) == (143, "stopped by SIGTERM\n")
    assert seconds < 15
    assert not any(_runs(pid) for pid in pids)


@pytest.mark.parametrize("endless", ["saves"], indirect=True)
def test_sigterm_waits_for_ranks_that_save(endless: Endless) -> None:
    process, folder, _ = endless
    code, err, seconds = _stop(process, folder, signal.SIGTERM)
    assert (code, err) == (143, "stopped by SIGTERM\n")
    assert seconds < 15
    assert [(folder / f"saved-{rank}").exists() for rank in range(2)] == [True, True]


@pytest.mark.parametrize("endless", ["saves"], indirect=True)
def test_a_second_signal_means_now(endless: Endless) -> None:
    process, folder, pids = endless
    code, _, seconds = _stop(process, folder, signal.SIGTERM, signal.SIGTERM)
    assert code == 143
    assert seconds < 15
    assert not any(_runs(pid) for pid in pids)
    assert not (folder / "saved-0").exists()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_no_rank_outlives_a_killed_parent(endless: Endless) -> None:
    process, _, pids = endless
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _await(lambda: not any(_runs(pid) for pid in pids), 5)


def test_a_stopped_rank_does_not_survive_the_failure_of_another(endless: Endless) -> None:
    process, folder, pids = endless
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    code, err, seconds = _stop(process, folder)
    assert code == 1
    assert seconds < 15
    assert err.startswith("rank 1 was killed by SIGKILL")
    assert not any(_runs(pid) for pid in pids)
