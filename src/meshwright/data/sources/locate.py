"""From `data.source` to files: what the user's path or glob means."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from glob import glob, has_magic
from pathlib import Path

from meshwright.config.errors import RequestError
from meshwright.data.sources.python import python_sources

TEXT_FORMATS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
TOKEN_FORMATS = (".npy", ".bin")
_RUN_FOLDER = frozenset(("run.toml", "plan.json", "metrics.jsonl"))
ACCEPTED = ('"python"', *TEXT_FORMATS, *TOKEN_FORMATS, ".bin with .idx beside it (Megatron)")


class SourceKind(Enum):
    """What the files hold."""

    TEXT = auto()
    TOKENS = auto()


@dataclass(frozen=True, slots=True)
class Located:
    """The files of a source in their order, which is the order of the stream."""

    kind: SourceKind
    files: tuple[Path, ...]


def locate(source: str) -> Located:
    """Files of "python", of a file, of a folder (all accepted files below it) or of a glob (`**` goes down).

    A Megatron data set may be named by its .bin, its .idx, or by the prefix of both. What is hidden below a folder is
    left out, as a glob leaves it out, and so are run folders: a run that reads "." would read its own figures.

    Each file once, sorted by path. Raises RequestError where nothing is found, a file named has another format, or
    text and token files are mixed.
    """
    if source == "python":
        return Located(SourceKind.TEXT, python_sources())
    try:
        files = _files(source)
    except OSError as error:
        raise RequestError(
            f'data.source = "{source}"', f"cannot be searched: {error.filename}: {error.strerror}", ACCEPTED
        ) from None
    unknown = [file for file in files if format_of(file) is None]
    if unknown:
        raise RequestError(f"data.source: {unknown[0]}", "is of no accepted format", ACCEPTED)
    kinds = {format_of(file) in TOKEN_FORMATS for file in files}
    if len(kinds) > 1:
        raise RequestError(f'data.source = "{source}"', "mixes text and token files", ["a glob of one kind"])
    return Located(SourceKind.TOKENS if kinds.pop() else SourceKind.TEXT, files)


def format_of(file: Path) -> str | None:
    """The accepted ending of a file's name, None where it has none. A source of the built-in corpus is text."""
    name = file.name.lower()
    if name.endswith(".py"):
        return ".txt"
    return next((ending for ending in (*TEXT_FORMATS, *TOKEN_FORMATS) if name.endswith(ending)), None)


def _files(source: str) -> tuple[Path, ...]:
    path = Path(source).expanduser()
    if path.is_file():
        return (_tokens_of(path) if path.suffix.lower() == ".idx" else path,)
    if (index := Path(f"{path}.idx")).is_file():
        return (_tokens_of(index),)
    if path.is_dir():
        found = set(_below(path))
        lack = "is a folder without a file of an accepted format"
    elif has_magic(source):
        found = {Path(name) for name in glob(str(path), recursive=True)}  # `**/**` names a file more than once
        found = {file for file in found if file.is_file() and file.suffix.lower() != ".idx"}
        lack = "matches no file"
    else:
        raise RequestError(f'data.source = "{source}"', "there is no such file or folder", ACCEPTED)
    if not found:
        raise RequestError(f'data.source = "{source}"', lack, ACCEPTED)
    return tuple(sorted(found, key=lambda file: file.as_posix()))


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder, onerror=_raise):
        if Path(place) != folder and _RUN_FOLDER.issubset(names):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = [Path(place, name) for name in names if not name.startswith(".")]
        yield from (file for file in files if format_of(file) is not None and file.is_file())


def _raise(error: OSError) -> None:
    """A folder that cannot be read is not an empty one."""
    raise error


def _tokens_of(index: Path) -> Path:
    tokens = index.with_suffix(".bin")
    if not tokens.is_file():
        raise RequestError(str(index), f"is an index without its tokens: there is no {tokens.name} beside it")
    return tokens
