"""A long file goes to the disk while it is written, where the system can; elsewhere it is written all the same."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.checkpoint.saver import _RUN_BYTES
from meshwright.checkpoint.storage import Local, local, writeback


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """The call is looked for once a process."""
    writeback._sync_file_range.cache_clear()
    yield
    writeback._sync_file_range.cache_clear()


def write(root: Path, *sizes: int) -> bytes:
    writing = Local(root).create("file")
    for number, size in enumerate(sizes):
        writing.write(bytes([number]) * size)
    writing.finish()
    return (root / "file").read_bytes()


def test_it_starts_whenever_enough_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(local, "WRITEBACK_BYTES", 1000)
    monkeypatch.setattr(local, "start_writeback", started.append)
    assert write(tmp_path, 400, 400, 400, 999) == b"\0" * 400 + b"\1" * 400 + b"\2" * 400 + b"\3" * 999
    assert len(started) == 1
    (tmp_path / "file").unlink()
    write(tmp_path, 1000, 5000, 999)
    assert len(started) == 3


def test_the_real_call_changes_nothing_of_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "WRITEBACK_BYTES", 1 << 20)
    sizes = [1 << 20, 3 << 20, 5]
    assert write(tmp_path, *sizes) == b"".join(bytes([number]) * size for number, size in enumerate(sizes))


def test_a_run_of_a_save_is_not_copied_into_the_buffer(tmp_path: Path) -> None:
    """It just filled the buffer, so that every byte of a save was copied once more before it was written."""
    writing = Local(tmp_path).create("file")
    writing.write(bytes(100))
    assert (tmp_path / "file").stat().st_size == 0
    writing.write(bytes(_RUN_BYTES))
    assert (tmp_path / "file").stat().st_size == 100 + _RUN_BYTES
    writing.finish()


@pytest.mark.parametrize("lacks", [AttributeError, OSError, TypeError])
def test_a_system_without_the_call(lacks: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, name: object) -> None:
            if lacks is not AttributeError:
                raise lacks()

    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(local, "WRITEBACK_BYTES", 10)
    assert writeback._sync_file_range() is None
    assert write(tmp_path, 100) == b"\0" * 100
