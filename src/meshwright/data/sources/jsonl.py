"""Lines of JSON, plain or compressed."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from meshwright.config.errors import RequestError
from meshwright.data.document import Piece, Skipped, empty
from meshwright.data.extra import import_extra
from meshwright.data.sources.records import documents_of
from meshwright.data.tokenizer.tokenizer import Tokenizer

_BLOCK_BYTES = 1 << 20


def read_jsonl(file: Path, text_field: str, tokenizer: Tokenizer) -> Iterator[Piece | Skipped]:
    """Documents of .jsonl, .jsonl.gz or .jsonl.zst. A bad line is skipped and told, a blank one is an empty text.

    Raises RequestError where a compressed file is damaged or cut off: what it lost cannot be counted.
    """
    number = 0
    try:
        for number, line in enumerate(_lines(_blocks(file)), start=1):
            if not line.strip():
                yield empty(str(file), number)
                continue
            record = _record(line)
            if isinstance(record, str):
                yield Skipped(str(file), number, record)
            else:
                yield from documents_of(record, str(file), number, text_field, tokenizer)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RequestError(f"{file}, after line {number}", f"is damaged or cut off: {error}") from None


def _record(line: bytes) -> dict[str, Any] | str:
    """The object of a line, or why it has none."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason} at byte {error.start}"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at character {error.colno}"
    except (RecursionError, ValueError) as error:
        return f"not readable JSON: {error}"
    return record if isinstance(record, dict) else f"a JSON {type(record).__name__}, not an object"


def _blocks(file: Path) -> Iterator[bytes]:
    """The decompressed file in blocks."""
    name = file.name.lower()
    if name.endswith(".zst"):
        yield from _zstandard_blocks(file)
        return
    with gzip.open(file) if name.endswith(".gz") else file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            yield block


def _zstandard_blocks(file: Path) -> Iterator[bytes]:
    """Frame after frame; a frame that does not end raises EOFError (the library's own reader would say nothing)."""
    zstandard = import_extra("zstandard", file)
    frame: Any = None
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            while block:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(block)
                except zstandard.ZstdError as error:
                    raise EOFError(error) from None
                block, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("the last frame does not end")


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their ends; one line at a time is held, however long."""
    held: list[bytes] = []
    for block in blocks:
        first, *rest = block.split(b"\n")
        held.append(first)
        for line in rest:
            yield b"".join(held)
            held = [line]
    last = b"".join(held)
    if last:
        yield last
