"""Whenever a machine dies in the middle of a save, what `latest` and a resume find is whole."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright.checkpoint.check import check_checkpoint
from meshwright.checkpoint.errors import SaveError
from meshwright.checkpoint.folder import Folder, find_checkpoint
from meshwright.checkpoint.loader import load
from meshwright.checkpoint.resume import resume
from meshwright.checkpoint.saver import Progress, Saver
from meshwright.comm.agree import Side
from meshwright.config.choices import Resume
from meshwright.parallel.engine import Engine
from tests.unit.checkpoint.saved import engine_of, saver_of


class Crash(BaseException):
    """The power is gone: nothing after it runs. Clean-up code that catches exceptions does not see it."""


class Fuse:
    """Lets a number of steps pass, then burns; `steps` are those it saw."""

    def __init__(self, passes: int, error: Callable[[], BaseException] = Crash) -> None:
        self._passes, self._error = passes, error
        self.steps: list[str] = []

    def __call__(self, step: str) -> None:
        if len(self.steps) >= self._passes:
            raise self._error()
        self.steps.append(step)


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    """The engine after 0, 1, 2 .. steps."""
    return [engine_of(step) for step in range(6)]


def saves(engines: list[Engine], root: Path, last: int, first: int = 1) -> None:
    """Checkpoints of steps first .. last."""
    for step in range(first, last + 1):
        saver_of(engines[step], root).save(Progress(step, step * 12))


@pytest.fixture(scope="module")
def prints(engines: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    """The fingerprints of every step's tensors."""
    root = tmp_path_factory.mktemp("prints")
    found: list[dict[str, int]] = [{}]
    for step in range(1, 6):
        saver_of(engines[step], root).save(Progress(step, 0))
        found.append({tensor.name: tensor.fingerprint for tensor in Folder(root).manifest(step).tensors})
    return found


def check_whole(root: Path, allowed: set[int], prints: list[dict[str, int]]) -> int:
    """`latest` and a resume both find a checkpoint of an allowed step, whole and of one save, and nothing is left over.

    Loading checks every block and every fingerprint. -> the step.
    """
    for address in (root / "latest", root):
        manifest = load(engine_of(0), address, Side())
        assert manifest.step in allowed
    found = resume(engine_of(0), Folder(root), Resume.AUTO, Side())
    assert found is not None
    assert found.step in allowed
    assert {tensor.name: tensor.fingerprint for tensor in found.tensors} == prints[found.step]
    assert [name for name in os.listdir(root / "checkpoints") if "." in name] == []
    assert Folder(root).incomplete() == []  # a removal that was cut left a folder for ever
    return found.step


def points(save: Callable[[Path, Fuse], None], start: Path | None, scratch: Path) -> Iterator[Path]:
    """A folder for each point of a save, cut there; and one where it came to its end."""
    root = fresh(start, scratch / "whole")
    fuse = Fuse(1 << 30)
    save(root, fuse)
    yield root
    for point in thinned(fuse.steps):
        root = fresh(start, scratch / f"point-{point}")
        with pytest.raises(Crash):
            save(root, Fuse(point))
        yield root
        shutil.rmtree(root, ignore_errors=True)


def thinned(steps: list[str]) -> list[int]:
    """Every point, but of the many writes of one data file only some."""
    writes = [point for point, step in enumerate(steps) if step.startswith("write") and "data" in step]
    return sorted({*range(len(steps))} - {*writes} | {*writes[:: max(len(writes) // 4, 1)]})


def fresh(start: Path | None, root: Path) -> Path:
    if start is not None:
        shutil.copytree(start, root)
    return root


def test_a_crash_at_every_point_of_a_save(engines: list[Engine], prints: list[dict[str, int]], tmp_path: Path) -> None:
    """Third save with keep = 2: writes, flushes, renames, the pointer, the removal of the oldest."""

    def third(root: Path, fuse: Fuse) -> None:
        saver_of(engines[3], root, fuse).save(Progress(3, 36))

    saves(engines, tmp_path / "start", 2)
    seen = set()
    count = 0
    for root in points(third, tmp_path / "start", tmp_path):
        seen.add(check_whole(root, {2, 3}, prints))
        saves(engines, root, 5, 4)  # the run goes on
        assert Folder(root).steps() == [5, 4]
        count += 1
    assert seen == {2, 3}
    assert count > 15


def test_a_crash_at_every_point_of_a_second_save_of_one_step(
    engines: list[Engine], prints: list[dict[str, int]], tmp_path: Path
) -> None:
    """The folder of the step steps aside first; a crash between both renames must not lose it."""

    def again(root: Path, fuse: Fuse) -> None:
        saver_of(engines[2], root, fuse).save(Progress(2, 24))

    saves(engines, tmp_path / "start", 2)
    for root in points(again, tmp_path / "start", tmp_path):
        Folder(root).clean()
        assert check_whole(root, {2}, prints) == 2


def test_a_crash_at_every_point_of_the_first_save(
    engines: list[Engine], prints: list[dict[str, int]], tmp_path: Path
) -> None:
    """Before the first is complete there is nothing to go on from, and the run starts afresh, tidied up."""

    def first(root: Path, fuse: Fuse) -> None:
        saver_of(engines[1], root, fuse).save(Progress(1, 12))

    for root in points(first, None, tmp_path):
        manifest = resume(engine_of(0), Folder(root), Resume.AUTO, Side())
        assert manifest is None or manifest.step == 1
        assert [name for name in (os.listdir(root / "checkpoints") if root.exists() else []) if "." in name] == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_killed_at_any_of_fifty_points(
    engines: list[Engine], prints: list[dict[str, int]], tmp_path: Path
) -> None:
    """SIGKILL, while the third save is written, in the foreground and behind training: what it flushed is all there
    is."""
    saves(engines, tmp_path / "start", 2)
    killed, seen = 0, set()
    for asynchronous in (False, True):
        fuse = Fuse(1 << 30)
        saver_of(engines[3], fresh(tmp_path / "start", tmp_path / f"dry-{asynchronous}"), fuse).save(Progress(3, 36))
        writes = [point for point, step in enumerate(fuse.steps) if step.startswith("write")]
        for point in sorted({*range(len(fuse.steps))} - {*writes} | {*writes[:: max(len(writes) // 12, 1)]}):
            root = fresh(tmp_path / "start", tmp_path / f"kill-{asynchronous}-{point}")
            killed += killed_at(point, engines[3], root, asynchronous)
            seen.add(check_whole(root, {2, 3}, prints))
            shutil.rmtree(root)
    assert killed >= 50
    assert seen == {2, 3}


def killed_at(point: int, engine: Engine, root: Path, asynchronous: bool) -> bool:
    """Whether a child that saves dies at a point of it."""

    class Kill(Fuse):
        def __call__(self, step: str) -> None:
            if len(self.steps) == point:
                os.kill(os.getpid(), signal.SIGKILL)
            self.steps.append(step)

    child = os.fork()
    if child == 0:
        saver = saver_of(engine, root, Kill(1 << 30), asynchronous=asynchronous)
        saver.save(Progress(3, 36))
        saver.wait()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


# ---------------------------------------------------------------------- full disks, broken disks


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "data")


def failure_of(saver: Saver, progress: Progress) -> str:
    """What a save that must fail says, at once or when it is waited for."""
    try:
        saver.save(progress)
        saver.wait()
    except SaveError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_fills_up_at_any_point(
    engines: list[Engine], prints: list[dict[str, int]], tmp_path: Path, asynchronous: bool
) -> None:
    """Needed and free bytes are told, nothing is left, the older checkpoint is whole, the next save succeeds."""
    saves(engines, tmp_path, 1)
    fuse = Fuse(1 << 30)
    saver_of(engines[2], tmp_path / "dry", fuse).save(Progress(2, 24))
    published = next(n for n, step in enumerate(fuse.steps) if step.startswith("rename"))
    for point in thinned(fuse.steps[: published + 1]):
        saver = saver_of(engines[2], tmp_path, Fuse(point, full), asynchronous=asynchronous)
        told = failure_of(saver, Progress(2, 24))
        assert re.search(r"disk full: a checkpoint needs [\d,]+ bytes, [\d,]+ are free at .*checkpoints", told), told
        if point:  # the removal itself fails on a disk that answers nothing
            Folder(tmp_path).clean()
        assert check_whole(tmp_path, {1}, prints) == 1
    saves(engines, tmp_path, 2, 2)
    assert check_whole(tmp_path, {2}, prints) == 2


def test_too_little_space_is_told_before_anything_is_written(
    engines: list[Engine], prints: list[dict[str, int]], tmp_path: Path
) -> None:
    folder = Folder(tmp_path)
    with pytest.raises(Exception, match=r"disk full: a checkpoint needs 1,152,921,504,606,846,976 bytes"):
        folder.begin(1, 1 << 60)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_real_disk_that_is_full(engines: list[Engine], prints: list[dict[str, int]], tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2000k", "none", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine mounts nothing")
    try:
        saves(engines, small, 1)
        (small / "filler").write_bytes(bytes(1_400_000))
        saver = saver_of(engines[2], small)
        saver._folder.storage.free_bytes = lambda: None  # type: ignore[method-assign]
        with pytest.raises(SaveError, match="disk full: a checkpoint needs"):
            saver.save(Progress(2, 24))
        assert os.listdir(small / "checkpoints") == ["step-00000001"]
        assert check_whole_of(small, 1)
        with pytest.raises(SaveError, match="disk full"):
            saver_of(engines[2], small).save(Progress(2, 24))
    finally:
        subprocess.run(["umount", str(small)], check=True)


def check_whole_of(root: Path, step: int) -> bool:
    checked = check_checkpoint(*find_checkpoint(root))
    return checked.problems == () and checked.manifest is not None and checked.manifest.step == step


def test_a_folder_that_may_not_be_written_is_named(
    engines: list[Engine], prints: list[dict[str, int]], tmp_path: Path
) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(SaveError, match="run/checkpoints"):
        saver_of(engines[1], tmp_path / "run").save(Progress(1, 12))


# ---------------------------------------------------------------------- keep, latest


def test_the_newest_stay_and_latest_names_the_last(
    engines: list[Engine], prints: list[dict[str, int]], tmp_path: Path
) -> None:
    saves(engines, tmp_path, 5)
    folder = Folder(tmp_path)
    assert folder.steps() == [5, 4]
    assert folder.latest() == "checkpoints/step-00000005"
    saver_of(engines[3], tmp_path).save(Progress(3, 36))  # an older one was resumed: its future is given up
    assert folder.steps() == [3]
    saver_of(engines[4], tmp_path, keep=1).save(Progress(4, 48))
    assert folder.steps() == [4]


def test_a_pointer_to_nowhere_is_no_reason_to_start_anew(
    engines: list[Engine], prints: list[dict[str, int]], tmp_path: Path
) -> None:
    saves(engines, tmp_path, 1)
    (tmp_path / "latest").write_text("checkpoints/step-00000009\n")
    manifest = resume(engine_of(0), Folder(tmp_path), Resume.AUTO, Side())
    assert manifest is not None
    (tmp_path / "latest").write_text("../../outside\n")
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(Exception, match="no checkpoint of this run"):
        resume(engine_of(0), Folder(tmp_path), Resume.AUTO, Side())


@pytest.mark.parametrize(
    ("lose", "told"),
    [
        (lambda step: (step / "manifest.json").unlink(), "has no manifest, so it is not complete"),
        (shutil.rmtree, "is gone, and latest names it"),
    ],
)
def test_what_was_later_and_is_lost_is_told(
    lose: Callable[[Path], object], told: str, engines: list[Engine], tmp_path: Path
) -> None:
    """A run went on from the one before without a word of it."""
    saves(engines, tmp_path, 2)
    lose(tmp_path / "checkpoints" / "step-00000002")
    lines: list[str] = []
    manifest = resume(engine_of(0), Folder(tmp_path), Resume.AUTO, Side(), told=lines.append)
    assert manifest is not None
    assert manifest.step == 1
    assert lines[0] == f"damaged: {tmp_path}/checkpoints/step-00000002: {told}"
    assert len(lines) == 2
    saves(engines, tmp_path, 3, 3)
    assert resume(engine_of(0), Folder(tmp_path), Resume.AUTO, Side(), told=lines.append) is not None
    assert len(lines) == 3


def test_one_save_is_in_flight(engines: list[Engine], prints: list[dict[str, int]], tmp_path: Path) -> None:
    """The copy is taken when `save` is called: what the step does meanwhile is not in it."""
    engine = engine_of(2)
    saver = saver_of(engine, tmp_path, asynchronous=True)
    saver.save(Progress(2, 24))
    for store in engine.stores:
        store.master.zero_()
    saver.save(Progress(3, 36))  # waits for the first
    assert Folder(tmp_path).steps()[-1] == 2
    saver.close()
    fresh = saver_of(engines[2], tmp_path / "fresh")
    fresh.save(Progress(2, 24))
    prints = [
        {t.name: t.fingerprint for t in Folder(root).manifest(2).tensors} for root in (tmp_path, tmp_path / "fresh")
    ]
    assert prints[0] == prints[1]
    assert saver.blocked_seconds > 0
