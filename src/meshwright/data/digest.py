"""What a corpus is: a digest of its content, remembered so that a restart need not read it again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

_CHUNK_BYTES = 1 << 22
_RACY_S = 2.0


@dataclass(frozen=True, slots=True)
class Content:
    """Digest (xxh3, 128 bits, hexadecimal) of files in order, their size, and their largest token if they hold tokens.

    Names and places do not enter: a corpus that moved is the same corpus.
    """

    digest: str
    size_bytes: int
    largest_token: int | None = None


def measure_files(files: Sequence[Path]) -> Content:
    """Content of files by a full read, in constant memory."""
    total = xxhash.xxh3_128()
    size_bytes = 0
    for file in files:
        own = xxhash.xxh3_128()
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                own.update(chunk)
                size_bytes += len(chunk)
        total.update(f"{file.suffix} {own.hexdigest()}\n".encode())
    return Content(total.hexdigest(), size_bytes)


def remembered(files: Sequence[Path], folder: Path, measure: Callable[[], Content], reading: str = "") -> Content:
    """`measure()`, or what it gave before for files of the same paths, sizes and times of change, and equal `reading`:
    how the files were understood, where more than their bytes decides what is measured.

    Files changed within the last two seconds are never trusted (a later write could keep their time). A memory that
    cannot be read or written is only slow, never wrong.
    """
    stamps = list(_stamps(files))
    key = xxhash.xxh3_128_hexdigest(json.dumps([reading, stamps]).encode())
    memory = folder / "digests" / f"{key}.json"
    with suppress(OSError, ValueError, TypeError):
        return Content(**json.loads(memory.read_text()))
    content = measure()
    if all(changed_ns < (time.time() - _RACY_S) * 1e9 for _, _, changed_ns, _ in stamps):
        with suppress(OSError):
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(memory, json.dumps(asdict(content)))
    return content


def combined_digest(parts: Iterable[str]) -> str:
    """One digest of several strings."""
    return xxhash.xxh3_128_hexdigest(json.dumps(list(parts)).encode())


def write_atomically(file: Path, text: str) -> None:
    """All of `text` or nothing; of two writers the later wins."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(file)


def _stamps(files: Sequence[Path]) -> Iterator[tuple[str, int, int, int]]:
    for file in files:
        status = file.stat()
        yield str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ino
