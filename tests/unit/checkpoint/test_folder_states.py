"""A run folder as people and crashes leave it: links, copies, things of another kind, no right to change anything."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from meshwright.checkpoint import front
from meshwright.checkpoint.errors import AddressError, CheckpointError, DamagedError, SaveError
from meshwright.checkpoint.folder import Folder, find_checkpoint, load_manifest
from meshwright.checkpoint.resume import resume
from meshwright.checkpoint.saver import Progress
from meshwright.checkpoint.storage import Local
from meshwright.comm.agree import Side
from meshwright.config.choices import Resume
from meshwright.config.errors import RequestError
from meshwright.parallel.engine import Engine
from tests.unit.checkpoint.saved import engine_of, save, saver_of


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of(1)


def resumed(address: Path | str, wanted: Resume = Resume.AUTO) -> tuple[int | None, str]:
    """The step a run goes on from, and what it says."""
    told: list[str] = []
    manifest = resume(engine_of(0), Folder(address), wanted, Side(), told=told.append)
    return manifest and manifest.step, "\n".join(told)


def test_a_pointer_that_is_a_link_leads_nowhere_else(engine: Engine, tmp_path: Path) -> None:
    """`latest` used to be written through a link that lay where its draft goes."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    run = tmp_path / "run"
    save(engine, run, 1)
    (run / "latest.draft").symlink_to(precious)
    save(engine, run, 2)
    assert precious.read_text() == "precious"
    assert not (run / "latest").is_symlink()
    (run / "latest").unlink()
    (run / "latest").symlink_to("checkpoints/step-00000001")
    save(engine, run, 3)
    assert (run / "latest").read_text() == "checkpoints/step-00000003\n"
    assert not (run / "latest").is_symlink()


def test_nothing_is_written_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    for name in ("there", "link"):
        with pytest.raises(FileExistsError):
            Local(tmp_path).create(name)
    assert (tmp_path / "there").read_text() == "old"


def test_a_folder_where_the_pointer_goes_is_named(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(SaveError, match=f"{tmp_path}/latest: Is a directory"):
        save(engine, tmp_path)


def test_a_copy_under_the_name_of_another_step_is_damage(engine: Engine, tmp_path: Path) -> None:
    """A run went on from step 1 and said it had found step 7."""
    copy = tmp_path / "checkpoints" / "step-00000007"
    shutil.copytree(save(engine, tmp_path, 1), copy)
    with pytest.raises(DamagedError, match=r"7/manifest\.json: is of step 1, in the folder of another step"):
        load_manifest(Local(tmp_path), "checkpoints/step-00000007")
    step, told = resumed(tmp_path)
    assert step == 1
    assert "damaged: " in told
    shutil.move(copy, tmp_path / "best")
    storage, path = find_checkpoint(tmp_path / "best")
    assert load_manifest(storage, path).step == 1  # a copy of one's own may have any name


@pytest.mark.parametrize("wanted", [Resume.AUTO, Resume.NONE])
def test_a_folder_that_may_not_be_changed_is_told_in_one_line(
    wanted: Resume, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a crash left could not be removed, and rank 0 fell while the others waited for it."""

    def refused(storage: Local, path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / path))

    save(engine, tmp_path)
    (tmp_path / "checkpoints" / "step-00000002.tmp-ab12").mkdir()
    monkeypatch.setattr(Local, "remove", refused)
    with pytest.raises(CheckpointError) as caught:
        resumed(tmp_path, wanted)
    assert str(caught.value).startswith(f"{tmp_path}/")
    assert str(caught.value).endswith(": Read-only file system")


def test_a_disk_with_bytes_but_without_room_says_what_ran_out(engine: Engine, tmp_path: Path) -> None:
    def at(step: str) -> None:
        if step.startswith("create"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), step)

    saver = saver_of(engine, tmp_path, at)
    needed = saver._subject.num_bytes
    for free, ending in ((needed + (2 << 20), "; what ran out is inodes or a quota"), (None, "/checkpoints")):
        saver._folder.storage.free_bytes = lambda free=free: free  # type: ignore[method-assign, misc]
        with pytest.raises(SaveError, match=f"disk full: a checkpoint needs {needed:,} bytes") as caught:
            saver.save(Progress(1, 12))
        assert str(caught.value).endswith(ending)


def test_a_store_is_found_by_its_pointer_and_its_folder_too(engine: Engine) -> None:
    pytest.importorskip("fsspec")
    address = f"memory://bucket-{uuid4().hex}/run"
    save(engine, address, 1)
    save(engine, address, 2)
    for name in ("", "/", "/latest", "/checkpoints", "/checkpoints/"):
        storage, path = find_checkpoint(f"{address}{name}")
        assert (storage.address.rstrip("/"), path) == (address, "checkpoints/step-00000002")
    assert find_checkpoint(f"{address}/checkpoints/step-00000001")[1] == ""
    for nothing in ("memory://latest", "memory://checkpoints", f"{address}/best/latest"):
        with pytest.raises(AddressError):
            find_checkpoint(nothing)
    with pytest.raises(RequestError, match="nothing there can be moved aside; what works: another name"):
        resumed(address, Resume.NONE)


def test_a_pointer_is_found_from_inside_its_folder(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(engine, tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in (".", "latest", "./latest", "checkpoints", "checkpoints/"):
        assert find_checkpoint(name)[1] == "checkpoints/step-00000001"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ((-1, 12), "step = -1: wanted is an int from 0 on"),
        ((1, -12), "samples = -12: "),
        ((3.5, 12), "step = 3.5: "),
        ((1, "12"), "samples = '12': "),
        ((True, 12), "step = True: "),
        ((1, 12, {"a": float("nan")}), "extra holds something other than JSON values: "),
        ((1, 12, {"a": object()}), "extra holds something other than JSON values: "),
    ],
)
def test_progress_that_could_not_be_read_again_is_not_saved(values: tuple[Any, ...], told: str) -> None:
    """Such a checkpoint was written, the good ones before it removed, and none could be loaded."""
    with pytest.raises(ValueError, match=re.escape(told)):
        Progress(*values)


def test_another_thing_than_an_engine_is_told(tmp_path: Path) -> None:
    module: Any = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match="a Linear is neither an engine nor what data_parallel returned"):
        front.save(module, tmp_path, 1, 12)
    assert not os.listdir(tmp_path)
