"""What a source yields: pieces of documents, and what it had to skip."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A run of text that is trained on, or only read (a prompt)."""

    text: str
    trained: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """A document, or a stretch of one that is too long to hold at once."""

    parts: tuple[Part, ...]
    ends_document: bool = True
    """Whether an end-of-document token follows."""
    trains_end: bool = True
    """Whether that token is a label."""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A record that is no document: an empty text (counted), or a bad one (counted and reported)."""

    file: str
    line: int
    """Line of a text file, row of a .parquet file, from 1."""
    reason: str
    bad: bool = True

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


def plain(text: str) -> Piece:
    """A whole document, all of it trained."""
    return Piece((Part(text),))


def empty(file: str, line: int) -> Skipped:
    """The rule for empty texts: a text of no characters is no document; white space alone is one."""
    return Skipped(file, line, "empty text", bad=False)
