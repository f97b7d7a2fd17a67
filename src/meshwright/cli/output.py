"""What goes to the screen: JSON objects, error messages, logs. Colour only where a terminal shows it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from typing import Any, TextIO

__all__ = [
    "logs_to_stderr",
    "open_standard_streams",
    "plain_warnings",
    "print_error",
    "print_json",
    "print_styled",
]


def open_standard_streams() -> None:
    """Make standard streams that can be written to, whatever this process was started with.

    One that is closed (``>&-``, some daemons) becomes the null device: else the next file or socket opened would take
    its number, here and in every rank, and what is printed would go there. A character that the terminal's encoding
    lacks is escaped, as on standard error anyway, and ends nothing.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            _open_null(number)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _open_null(number: int) -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    os.set_inheritable(number, True)


def print_json(value: Mapping[str, Any], *, indent: int | None = None, stream: TextIO | None = None) -> None:
    """Write one JSON object and a line end to ``stream`` (standard output). NaN and infinities are refused."""
    stream = stream or sys.stdout
    readable = (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")
    text = json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=not readable)
    print(text, file=stream, flush=True)


def print_error(message: str) -> None:
    """Write one message to standard error."""
    print_styled(f"error: {message}", {r"^error:": "bold red"}, sys.stderr)


def print_styled(text: str, styles: Mapping[str, str], stream: TextIO) -> None:
    """Write ``text``; on a terminal what matches a pattern is styled, where ``NO_COLOR`` does not forbid it.

    ``styles`` maps a regular expression to a rich style.
    """
    if not stream.isatty():
        print(text, file=stream, flush=True)
        return
    from rich.console import Console  # reads NO_COLOR and TERM itself
    from rich.text import Text

    styled = Text(text)
    for pattern, style in styles.items():
        styled.highlight_regex(pattern, style)
    Console(file=stream, soft_wrap=True).print(styled)


@contextlib.contextmanager
def logs_to_stderr() -> Iterator[None]:
    """Send this project's log to standard error while a command runs."""
    logger = logging.getLogger("meshwright")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Show a warning as one line that begins with ``warning:`` while a command runs, not as a place in the code."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *_where, **_more: f"warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = usual
