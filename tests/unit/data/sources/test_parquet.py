"""Rows of .parquet files."""

from pathlib import Path

import pytest

from meshwright.config.errors import RequestError
from meshwright.data.document import Part, Piece, Skipped, plain
from meshwright.data.sources.parquet import read_parquet
from meshwright.data.tokenizer.bytewise import ByteTokenizer

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
BYTES = ByteTokenizer()


def test_rows_are_documents(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    texts = [f"row {number}" for number in range(3000)] + [None, "", "last"]
    pq.write_table(pa.table({"text": texts, "weight": range(len(texts))}), file, row_group_size=700)
    *rows, null, nothing, last = read_parquet(file, "text", BYTES)
    assert rows == [plain(text) for text in texts[:3000]]
    assert isinstance(null, Skipped)
    assert (null.line, null.bad) == (3001, True)
    assert isinstance(nothing, Skipped)
    assert (nothing.line, nothing.bad) == (3002, False)
    assert last == plain("last")


def test_prompt_and_completion_columns(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["p"], "completion": ["c"]}), file)
    assert list(read_parquet(file, "text", BYTES)) == [Piece((Part("p", trained=False), Part("c")))]


def test_a_file_of_other_columns_is_refused_with_their_names(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["c"]}), file)
    with pytest.raises(RequestError, match=r'no column "text".*data\.text_field = content'):
        list(read_parquet(file, "text", BYTES))


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    file.write_bytes(b"no parquet at all")
    with pytest.raises(RequestError, match=r"a\.parquet"):
        list(read_parquet(file, "text", BYTES))


def test_damaged_pages_are_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", "two"]}), file)
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(content)
    with pytest.raises(RequestError, match=r"a\.parquet: cannot be read as parquet"):
        list(read_parquet(file, "text", BYTES))
