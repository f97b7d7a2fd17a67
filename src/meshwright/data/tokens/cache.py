"""The token cache: text is tokenised once, into a folder named by what decides its tokens.

    <folder>/<key>/  tokens.bin  starts.bin  [trained.bin]  index.json       key = corpus content x tokenizer x field

A cache is built in a folder beside it and renamed when whole, so a reader sees all of it or none. Of two processes
that build at once, the second finds the name taken and uses the first one's. A lock only spares the second its work.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import numpy as np

from meshwright.config.errors import RequestError
from meshwright.data.document import Piece, Skipped
from meshwright.data.tokenizer.tokenizer import Tokenizer, token_dtype
from meshwright.data.tokens.stream import Shard, StartsIndex
from meshwright.data.tokens.writer import STARTS, TOKENS, TRAINED, TokenWriter

FORMAT = 2  # 1 took the byte order mark of a text file for text
MAX_PROBLEMS = 20
"""Bad records that are told one by one; all are counted."""
_INDEX = "index.json"
_BATCH_CHARACTERS = 1 << 20
_BATCH_PIECES = 1 << 10
_ABANDONED_S = 86_400

Documents = Iterable[Piece | Skipped]


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of a source."""

    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    empty: int = 0
    """Empty texts, left out."""
    bad: int = 0
    """Bad records, left out."""
    problems: tuple[str, ...] = ()
    """The first of the bad records: file, line and reason."""


class NothingAcceptedError(Exception):
    """A source without a single document."""

    def __init__(self, counts: Counts) -> None:
        super().__init__(counts)
        self.counts = counts


def cached_tokens(folder: Path, key: str, tokenizer: Tokenizer, read: Callable[[], Documents]) -> tuple[Shard, Counts]:
    """The tokens of `read()`'s documents, built unless `folder` holds them under `key` already.

    Raises NothingAcceptedError, and RequestError where the folder cannot be written. An error leaves nothing behind.
    """
    place = folder / key
    found = _opened(place)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f"{key}.lock"):
            found = _opened(place)
            if found is None:
                _remove_abandoned(folder, key)
                _build(place, tokenizer, read())
                found = _opened(place)
    except OSError as error:
        value = str(error.filename or folder)
        raise RequestError(
            value, f"cannot be read or written while text becomes tokens: {error.strerror or error}"
        ) from error
    if found is None:
        raise RequestError(str(place), "the token cache just built is not whole: does another process delete it?")
    return found


def _opened(place: Path) -> tuple[Shard, Counts] | None:
    """The cache at `place`, memory-mapped; None where there is none, or where it is not whole."""
    try:
        index: dict[str, Any] = json.loads((place / _INDEX).read_text())
        counts = Counts(**index["counts"])
        dtype = np.dtype(index["dtype"])
        tokens = np.memmap(place / TOKENS, dtype=dtype, mode="r", shape=(counts.tokens,))
        starts = np.memmap(place / STARTS, dtype="<i8", mode="r", shape=(counts.documents,))
        trained = None
        if counts.trained_tokens != counts.tokens:
            trained = np.memmap(place / TRAINED, dtype=np.uint8, mode="r", shape=(-(-counts.tokens // 8),))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    bits = None if trained is None else trained.view(np.ndarray)
    documents = StartsIndex(starts.view(np.ndarray))
    return Shard(tokens.view(np.ndarray), documents, bits), replace(counts, problems=tuple(counts.problems))


def _build(place: Path, tokenizer: Tokenizer, documents: Documents) -> None:
    draft = Path(tempfile.mkdtemp(prefix=f"{place.name}.building-", dir=place.parent))
    try:
        with _termination_as_exit():
            _write(draft, tokenizer, documents)
        _publish(draft, place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _termination_as_exit() -> Iterator[None]:
    """SIGTERM as SystemExit, so that a draft of gigabytes goes with the process; whoever takes SIGTERM keeps it."""
    ours = current_thread() is main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    try:
        if ours:
            signal.signal(signal.SIGTERM, leave)
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _write(draft: Path, tokenizer: Tokenizer, documents: Documents) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    with TokenWriter(draft, dtype) as writer:
        counts = _tokenise(documents, tokenizer, writer)
        if not counts.documents:
            raise NothingAcceptedError(counts)
        writer.close()
    _write_index(draft, {"format": FORMAT, "dtype": dtype.newbyteorder("<").str, "counts": asdict(counts)})


def _tokenise(documents: Documents, tokenizer: Tokenizer, writer: TokenWriter) -> Counts:
    empty = bad = 0
    problems: list[str] = []
    end = np.array([tokenizer.end_of_document], dtype=token_dtype(tokenizer.vocab_size))
    for batch in _batches(documents):
        pieces = [item for item in batch if isinstance(item, Piece)]
        for item in batch:
            if isinstance(item, Skipped):
                bad, empty = bad + item.bad, empty + (not item.bad)
                problems += [str(item)] * (item.bad and len(problems) < MAX_PROBLEMS)
        for piece, encoded in zip(pieces, tokenizer.encode(pieces), strict=True):
            writer.add(encoded.tokens, encoded.trained)
            if piece.ends_document:
                ended = encoded.tokens[-1:] == end  # a chat template may write the token itself
                if not ended.all() or not ended.size:
                    writer.add(end, np.array([piece.trains_end]))
                writer.end_document()
    return Counts(writer.num_documents, writer.num_tokens, writer.num_trained, empty, bad, tuple(problems))


def _batches(documents: Documents) -> Iterator[list[Piece | Skipped]]:
    """Runs of about a megabyte: enough for a tokenizer's threads, little enough to hold."""
    batch: list[Piece | Skipped] = []
    characters = 0
    for item in documents:
        batch.append(item)
        characters += sum(len(part.text) for part in item.parts) if isinstance(item, Piece) else 0
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    yield batch


def _remove_abandoned(folder: Path, key: str) -> None:
    """Drafts of processes that were killed a day ago or earlier."""
    for draft in folder.glob(f"{key}.building-*"):
        with suppress(OSError):
            if time.time() - draft.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(draft)


def _write_index(folder: Path, index: dict[str, Any]) -> None:
    with (folder / _INDEX).open("w") as stream:
        json.dump(index, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def _publish(draft: Path, place: Path) -> None:
    """Rename into place. A whole cache that came first stays; a broken one makes way."""
    draft.chmod(0o755)
    try:
        draft.rename(place)
    except OSError:
        if _opened(place) is not None:
            return
        place.rename(draft.with_suffix(".broken"))
        shutil.rmtree(draft.with_suffix(".broken"), ignore_errors=True)
        draft.rename(place)


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Held by one process at a time where the file system has locks; ended with the process, however it ends."""
    with file.open("w") as stream:
        try:
            with suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield
        finally:
            file.unlink(missing_ok=True)
