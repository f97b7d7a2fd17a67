"""Text files: a file is a document."""

from __future__ import annotations

from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Iterator
from pathlib import Path

from meshwright.data.document import Part, Piece, Skipped, empty, plain

BLOCK_BYTES = 1 << 23
"""A longer file is read in blocks of this size, each cut after its last line break."""


def read_text(file: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[Piece | Skipped]:
    """The file as one document of UTF-8 text: line ends are kept as they are, a byte order mark is none of it.

    A file that is not UTF-8 is skipped whole, with the line of its first bad byte.
    """
    fault = _first_fault(file, block_bytes)
    if fault is not None:
        yield fault
        return
    size_bytes = file.stat().st_size
    if size_bytes <= max(block_bytes, len(BOM_UTF8)):
        text = file.read_bytes().decode("utf-8-sig")
        yield plain(text) if text else empty(str(file), 1)
    else:
        yield from _blocks(file, block_bytes)


def _first_fault(file: Path, block_bytes: int) -> Skipped | None:
    """The first byte that is no UTF-8: read before anything is yielded, since a document is taken whole or not."""
    decoder = getincrementaldecoder("utf-8")()
    line = 1
    with file.open("rb") as stream:
        while True:
            block = stream.read(block_bytes)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                return Skipped(str(file), line, f"not UTF-8: {error.reason}")
            if not block:
                return None
            line += block.count(b"\n")


def _blocks(file: Path, block_bytes: int) -> Iterator[Piece]:
    decoder = getincrementaldecoder("utf-8-sig")()
    held = ""
    with file.open("rb") as stream:
        while block := stream.read(block_bytes):
            held += decoder.decode(block)
            cut = held.rfind("\n") + 1 or len(held)
            if held[:cut]:
                yield Piece((Part(held[:cut]),), ends_document=False)
            held = held[cut:]
    yield Piece((Part(held),))
