"""``section.key=value`` on a command line: TOML values, with bare words as strings."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.config.errors import RequestError

__all__ = ["Override", "parse_override", "parse_overrides", "superseded"]

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_STRINGS_OR_WORD = re.compile(r"""("(?:\\.|[^"\\])*"|'[^']*')|(?<![\w.+/-])([A-Za-z_][\w./+-]*)(?![\w]*\s*=)""")
_TOML_WORDS = frozenset({"true", "false", "inf", "nan"})


@dataclass(frozen=True, slots=True)
class Override:
    """One key's value from a command line; ``key`` is the path of names to it."""

    key: tuple[str, ...]
    value: Any
    text: str

    @property
    def name(self) -> str:
        """The dotted key."""
        return ".".join(self.key)


def parse_overrides(texts: Sequence[str]) -> tuple[Override, ...]:
    """Parse each text; all that cannot be read are told in one ``RequestError``."""
    overrides: list[Override] = []
    problems: list[RequestError] = []
    for text in texts:
        try:
            overrides.append(parse_override(text))
        except RequestError as problem:
            problems.append(problem)
    if problems:
        raise RequestError.joined(problems)
    return tuple(overrides)


def superseded(texts: Sequence[str]) -> tuple[str, ...]:
    """A line for every key that one command line gives different values: the last one counts, and is to be told.

    Words that are no overrides are for ``parse_overrides`` to tell.
    """
    given: dict[str, list[str]] = {}
    for text in texts:
        given.setdefault(text.partition("=")[0].strip(), []).append(text)
    return tuple(
        f"{name} is given {len(words)} times: {words[-1]} counts"
        for name, words in given.items()
        if len(set(words)) > 1
    )


def parse_override(text: str) -> Override:
    """Parse ``section.key=value``.

    The value is TOML (``4``, ``1e-3``, ``true``, ``"text"``, ``[0.9, 0.95]``, ``{kind="yarn", factor=4.0}``). What is
    no TOML value and opens no bracket or quote is a string: ``zb-v``, ``data/*.jsonl``. Inside brackets bare words are
    strings too, since a shell takes the quotes away. Raises ``RequestError``.
    """
    name, equals, value = text.partition("=")
    name, value = name.strip(), value.strip()
    if not equals:
        raise RequestError(text, "is no override: a key and its value are joined by =", (f"{name}=VALUE",))
    if not _KEY.fullmatch(name):
        raise RequestError(text, f'"{name}" is no key', ("section.key=value",))
    if not value:
        raise RequestError(text, "has no value after =", (f'{name}=""  (an empty string, in the shell {name}=\'""\')',))
    return Override(tuple(name.split(".")), _parse_value(text, value), text)


def _parse_value(text: str, value: str) -> Any:
    """Read one TOML value, or a bare word as the string it is."""
    try:
        return _toml_value(value)
    except tomllib.TOMLDecodeError as error:
        if value[0] not in "[{\"'":
            return value
        try:
            return _toml_value(_STRINGS_OR_WORD.sub(_quoted, value))
        except tomllib.TOMLDecodeError:
            reason = re.sub(r"\s*\(at .*\)$", "", str(error))
            raise RequestError(text, f"{value} is no TOML value: {reason}", ("[0.9, 0.95]", '"text"')) from None


def _toml_value(value: str) -> Any:
    if "\n" in value or "\r" in value:
        raise tomllib.TOMLDecodeError("a value is one line")
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # whole numbers of thousands of digits, brackets in thousands
        raise RequestError(f"{value:.40}..", f"cannot be read as TOML: {error}") from None


def _quoted(match: re.Match[str]) -> str:
    word = match[2]
    return match[0] if word is None or word in _TOML_WORDS else f'"{word}"'
