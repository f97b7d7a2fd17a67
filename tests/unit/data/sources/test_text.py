"""Text files and the built-in corpus."""

from pathlib import Path

import pytest

from meshwright.config.errors import RequestError
from meshwright.data.document import Piece, Skipped, plain
from meshwright.data.sources.python import python_sources
from meshwright.data.sources.text import read_text


def test_a_file_is_a_document_with_its_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("one\r\ntwo\né".encode())
    assert list(read_text(file)) == [plain("one\r\ntwo\né")]


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 10, 1000])
def test_blocks_of_a_long_file_are_one_document(tmp_path: Path, block_bytes: int) -> None:
    file = tmp_path / "a.txt"
    text = "line é\nlonger line ☃\n\nno end: 𝔘" * 3
    file.write_text(text, encoding="utf-8")
    pieces = [piece for piece in read_text(file, block_bytes) if isinstance(piece, Piece)]
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize("block_bytes", [1, 2, 4, 1000])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, block_bytes: int) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\nt\xef\xbb\xbfo")
    pieces = [piece for piece in read_text(file, block_bytes) if isinstance(piece, Piece)]
    assert "".join(piece.text for piece in pieces) == "one\nt\ufeffo"
    file.write_bytes(b"\xef\xbb\xbf")
    assert [item.reason for item in read_text(file, block_bytes) if isinstance(item, Skipped)] == ["empty text"]


@pytest.mark.parametrize("block_bytes", [2, 5, 1000])
def test_a_file_that_is_not_utf8_is_skipped_whole(tmp_path: Path, block_bytes: int) -> None:
    """B78 (Megatron-LM#62), the byte 0xff; and a character cut off by the end of the file."""
    file = tmp_path / "a.txt"
    for content, line in [(b"fine\nstill fine\nbad \xff here\n", 3), (b"fine\n\xe2\x82", 2)]:
        file.write_bytes(content)
        (item,) = read_text(file, block_bytes)
        assert isinstance(item, Skipped)
        assert item.bad
        assert item.line == line


def test_an_empty_file_is_no_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (item,) = read_text(tmp_path / "a.txt")
    assert isinstance(item, Skipped)
    assert not item.bad


def test_the_built_in_corpus_leaves_out_tests_and_installed_packages() -> None:
    files = python_sources()
    assert len(files) > 300
    names = {file.name for file in files}
    assert {"argparse.py", "dataclasses.py"} <= names
    parts = {part for file in files for part in file.parts[len(files[0].parts) - 1 :]}
    assert not parts & {"test", "tests", "idlelib", "site-packages", "__pycache__"}
    assert files == python_sources()


def test_an_interpreter_without_sources_is_told(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="holds none"):
        python_sources(tmp_path)
