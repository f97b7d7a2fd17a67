"""The digest of a corpus, and when it may be remembered."""

import os
import time
from pathlib import Path

import pytest

from meshwright.data.digest import Content, measure_files, remembered


def write(file: Path, content: bytes, age_s: float = 100) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    os.utime(file, (time.time() - age_s,) * 2)
    return file


def test_content_counts_and_place_does_not(tmp_path: Path) -> None:
    here = [write(tmp_path / "1" / "a.txt", b"a"), write(tmp_path / "1" / "b.txt", b"bc")]
    there = [write(tmp_path / "2" / "x.txt", b"a"), write(tmp_path / "2" / "y.txt", b"bc")]
    moved_border = [write(tmp_path / "3" / "a.txt", b"ab"), write(tmp_path / "3" / "b.txt", b"c")]
    assert measure_files(here) == measure_files(there)
    assert measure_files(here).size_bytes == 3
    digests = {measure_files(files).digest for files in (here, here[::-1], moved_border, here[:1])}
    assert len(digests) == 4


def test_unchanged_files_are_not_read_again(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.npy", b"a")]
    content = Content("digest", 1, 7)
    assert remembered(files, tmp_path / "cache", lambda: content) == content
    assert remembered(files, tmp_path / "cache", lambda: pytest.fail("read again")) == content
    write(files[0], b"b", age_s=50)
    assert remembered(files, tmp_path / "cache", lambda: Content("other", 1)).digest == "other"


def test_files_just_written_are_never_trusted(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.npy", b"a", age_s=0)]
    reads: list[int] = []
    for _ in range(2):
        remembered(files, tmp_path / "cache", lambda: reads.append(1) or Content("d", 1))
    assert len(reads) == 2


@pytest.mark.parametrize("damage", ["", "[]", '{"digest": 1}', "\x80"])
def test_a_damaged_memory_is_only_slow(tmp_path: Path, damage: str) -> None:
    files = [write(tmp_path / "a.npy", b"a")]
    remembered(files, tmp_path / "cache", lambda: Content("d", 1))
    (memory,) = (tmp_path / "cache" / "digests").iterdir()
    memory.write_text(damage)
    assert remembered(files, tmp_path / "cache", lambda: Content("again", 1)).digest == "again"


def test_a_memory_that_cannot_be_written_is_only_slow(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.npy", b"a")]
    assert remembered(files, files[0] / "no folder", lambda: Content("d", 1)).digest == "d"
