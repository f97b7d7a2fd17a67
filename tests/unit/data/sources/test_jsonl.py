"""Lines of JSON: what becomes a document, and how everything else is told."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from meshwright.config.errors import RequestError
from meshwright.data.document import Part, Piece, Skipped, plain
from meshwright.data.sources.jsonl import read_jsonl
from meshwright.data.tokenizer.bytewise import ByteTokenizer

BYTES = ByteTokenizer()


def read(file: Path, field: str = "text") -> list[Piece | Skipped]:
    return list(read_jsonl(file, field, BYTES))


def test_every_line_is_a_document_or_told(tmp_path: Path) -> None:
    """B78 (Megatron-LM#62): empty, normal, white space, missing key, null, broken JSON, invalid UTF-8, 5 MB."""
    file = tmp_path / "a.jsonl"
    long = "x" * 5_000_000
    lines = [
        b'{"text": ""}',
        b'{"text": "normal"}',
        b'{"text": "  "}',
        b'{"other": 1}',
        b'{"text": null}',
        b'{"text": "broken',
        b'{"text": "a\xffb"}',
        json.dumps({"text": long}).encode(),
        b"",
        b"[1]",
        b'{"text": 5}',
        b'{"text": "\\ud800"}',
        b"[" * 200_000,
        b'{"text": "last"}',
    ]
    file.write_bytes(b"\n".join(lines))
    items = read(file)
    assert [item for item in items if isinstance(item, Piece)] == [
        plain("normal"),
        plain("  "),
        plain(long),
        plain("last"),
    ]
    skipped = [item for item in items if isinstance(item, Skipped)]
    assert [item.line for item in skipped if not item.bad] == [1, 9]
    told = {item.line: item.reason for item in skipped if item.bad}
    assert list(told) == [4, 5, 6, 7, 10, 11, 12, 13]
    assert 'has no field "text"' in told[4]
    assert "null" in told[5]
    assert "not JSON" in told[6]
    assert "not UTF-8: invalid start byte at byte 11" in told[7]
    assert "list" in told[10]
    assert "int" in told[11]
    assert "surrogate" in told[12]
    assert str(skipped[1]).startswith(f"{file}:4: ")


def zstd(data: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor()
    half = len(data) // 2
    return compressor.compress(data[:half]) + compressor.compress(data[half:])


@pytest.mark.parametrize(("ending", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_compressed_lines(tmp_path: Path, ending: str, compress: Callable[[bytes], bytes]) -> None:
    texts = [f"document {number}" * 50 for number in range(5000)]
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    file = tmp_path / f"a.jsonl{ending}"
    file.write_bytes(compress(content))
    assert read(file) == [plain(text) for text in texts]


@pytest.mark.parametrize(("ending", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_a_damaged_file_is_refused_not_shortened(
    tmp_path: Path, ending: str, compress: Callable[[bytes], bytes]
) -> None:
    content = compress(b'{"text": "a"}\n' * 1000)
    file = tmp_path / f"a.jsonl{ending}"
    for damaged in (content[:-5], b"no such format", content + b"rest of something else"):
        file.write_bytes(damaged)
        with pytest.raises(RequestError, match=r"after line \d+.*damaged or cut off"):
            read(file)


def test_prompts_are_not_trained(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    records = [
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": "", "completion": "alone"},
        {"prompt": "nothing", "completion": ""},
        {"prompt": "half"},
        {"text": "wins", "prompt": "p", "completion": "c"},
    ]
    file.write_text("\n".join(json.dumps(record) for record in records))
    first, alone, nothing, half, text = read(file)
    assert first == Piece((Part("2+2=", trained=False), Part("4")))
    assert alone == plain("alone")
    assert isinstance(nothing, Skipped)
    assert not nothing.bad
    assert isinstance(half, Skipped)
    assert half.bad
    assert text == plain("wins")


def test_another_field_and_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"body": "a"}\r\n{"body": "b"}\r\n')
    assert read(file, "body") == [plain("a"), plain("b")]


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Hi"}]}')
    with pytest.raises(RequestError, match="chat template"):
        read(file)


NULL = '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": null}]'


@pytest.mark.parametrize("messages", ["[]", '"Hi"', "[1]", '[{"role": "user"}]', '[{"content": "Hi"}]', NULL])
def test_malformed_messages_are_bad_lines(tmp_path: Path, messages: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"messages": {messages}}}')
    (item,) = read(file)
    assert isinstance(item, Skipped)
    assert item.bad
