"""Files for users: whole or as they were, and refused before the work that would fill them."""

import os
from pathlib import Path

import pytest

from meshwright.config import whole
from meshwright.config.errors import RequestError
from meshwright.config.whole import check_writable, write_whole


def test_a_file_is_replaced_at_once_and_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    file.chmod(0o600)
    write_whole(file, "after")
    assert file.read_text() == "after"
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_ends_a_write_leaves_the_file_as_it_was(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster file was cut off where its writer was ended."""
    file = tmp_path / "file"
    file.write_text("before")

    def fails(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(whole.os, "fsync", fails)
    with pytest.raises(RequestError if isinstance(error, OSError) else KeyboardInterrupt):
        write_whole(file, "after")
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("before")
    (tmp_path / "here").symlink_to("there")
    write_whole(tmp_path / "here", "after")
    assert (tmp_path / "here").is_symlink()
    assert (tmp_path / "there").read_text() == "after"


def test_a_device_is_written_in_place() -> None:
    check_writable(Path(os.devnull))
    write_whole(Path(os.devnull), "text")
    assert not Path(os.devnull).is_file()
    with pytest.raises(RequestError, match="cannot be written"):
        write_whole(Path("/dev/full"), "text")


@pytest.mark.parametrize(("name", "rule"), [("", "is a folder"), ("none/file", "no folder"), ("x" * 300, "cannot be")])
def test_a_place_that_takes_no_file_is_refused(name: str, rule: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=rule):
        check_writable(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
