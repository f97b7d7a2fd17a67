"""What is no checkpoint, and what can be none, is refused by one line that names the address and the rule."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from meshwright.checkpoint.errors import AddressError, DamagedError
from meshwright.checkpoint.folder import Folder, find_checkpoint
from meshwright.checkpoint.newfolder import new_folder
from meshwright.checkpoint.storage import Local, write_small
from meshwright.cli.checkpoints import found
from meshwright.config.errors import RequestError
from tests.unit.checkpoint.saved import engine_of, save


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("", "'' is no address: it is empty"),
        ("  ", "'  ' is no address: it is empty"),
        ("file://", "file:// is no address: it is empty"),
        ("a\0b", r"'a\\x00b' is no address: it holds a NUL"),
        ("{here}/nowhere", "{here}/nowhere is no checkpoint: there is no such folder"),
        ("{here}/file", "{here}/file is no checkpoint: it is a file; name its folder"),
        ("{here}", r"{here} is no checkpoint: it holds neither a manifest.json nor checkpoints/step-"),
        ("{here}/" + "x" * 300, "x{{300}} cannot be read: File name too long"),
        ("nobody-knows://x", "nobody-knows://x cannot be opened: "),
    ],
)
def test_an_address_without_a_checkpoint(address: str, told: str, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "file").write_text("")
    address, told = address.format(here=tmp_path), told.format(here=tmp_path)
    with pytest.raises(AddressError, match=told):
        find_checkpoint(address)
    with pytest.raises(RequestError) as refused:
        found(address)
    with pytest.raises(AddressError) as caught:
        find_checkpoint(address)
    assert (refused.value.value, refused.value.rule) == (caught.value.address, caught.value.rule)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("", "'': is no address: it is empty"),
        ("a\0b", "is no address: it holds a NUL"),
        ("{here}/file/inside", "{here}/file/inside: {here}/file is no folder"),
        ("{here}/" + "x" * 300, "cannot be (made|read): File name too long"),
        ("nobody-knows://x", "nobody-knows://x: cannot be opened: "),
    ],
)
def test_an_address_where_nothing_can_be_written(address: str, told: str, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(RequestError, match=told.format(here=tmp_path)),
        new_folder(address.format(here=tmp_path), 1),
    ):
        pytest.fail("nothing can be written there")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that counts no blocks")
def test_a_file_system_that_counts_nothing_is_not_full() -> None:
    assert Local(Path("/proc/anything")).free_bytes() is None
    with pytest.raises(RequestError, match="/proc/anything: cannot be made: "), new_folder("/proc/anything", 1):
        pytest.fail("nothing can be written there")


def test_a_broken_pointer_is_damage_and_named_once(tmp_path: Path) -> None:
    save(engine_of(0), tmp_path)
    (tmp_path / "latest").write_text("../elsewhere\n")
    with pytest.raises(DamagedError) as caught:
        found(str(tmp_path / "latest"))
    assert str(caught.value).count(str(tmp_path)) == 1
    assert found(str(tmp_path))[1] == "checkpoints/step-00000001"


def test_a_local_address_may_be_written_as_one(tmp_path: Path) -> None:
    save(engine_of(0), tmp_path)
    storage, path = find_checkpoint(f"file://{tmp_path}")
    assert (storage.address, path) == (str(tmp_path), "checkpoints/step-00000001")
    shutil.move(tmp_path / path, tmp_path / "moved")
    assert find_checkpoint(tmp_path / "moved")[0].address == str(tmp_path / "moved")
    assert Folder(tmp_path).steps() == []


def test_a_folder_that_is_there_already_is_filled(tmp_path: Path) -> None:
    """A mounted disk, a link to one, the folder one stands in: a rename over it failed when all was written."""
    place = tmp_path / "disk"
    place.mkdir()
    (tmp_path / "link").symlink_to(place)
    with new_folder(tmp_path / "link", 1) as draft:
        for name in ("a", "z"):
            write_small(draft.storage, draft.path(name), b"x")
        assert os.listdir(place) == [draft.folder]
        draft.finish(b"{}")
    assert sorted(os.listdir(place)) == ["a", "manifest.json", "z"]
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"]


def test_a_folder_that_is_there_already_is_left_as_it_was(tmp_path: Path) -> None:
    def fails() -> None:
        with new_folder(tmp_path, 1) as draft:
            write_small(draft.storage, draft.path("a"), b"x")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_mounted_disk_takes_a_folder(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2000k", "none", str(place)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with new_folder(place, 1) as draft:
            write_small(draft.storage, draft.path("a"), b"x")
            draft.finish(None)
        assert os.listdir(place) == ["a"]
    finally:
        subprocess.run(["umount", str(place)], check=True)
