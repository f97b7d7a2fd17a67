"""JSON from an untrusted file: every key once, no NaN, the types one expects; anything else is damage, told by path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from meshwright.checkpoint.errors import DamagedError
from meshwright.config.once import once

__all__ = ["Reader", "parse"]

_LIMIT = 1 << 62
"""No size or count in a file is larger."""


def parse(text: bytes, file: str) -> Any:
    """The JSON value of `text`. Raises DamagedError."""
    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedError(file, f"is not JSON as it should be ({error})") from None


class Reader:
    """One JSON object of `file`; every access checks the type and names the place."""

    def __init__(self, value: Any, file: str, place: str = "") -> None:
        self._file, self._place = file, place
        if not isinstance(value, dict):
            self.refuse("is not an object")
        self._value: dict[str, Any] = value

    def refuse(self, problem: str) -> NoReturn:
        raise DamagedError(self._file, f"{self._place or 'the whole'} {problem}")

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            self.refuse(f"has no text {key}")
        return value

    def count(self, key: str, at_most: int = _LIMIT) -> int:
        return self._count(key, self._get(key), at_most)

    def counts(self, key: str) -> tuple[int, ...]:
        return tuple(self._count(key, each, _LIMIT) for each in self.values(key))

    def values(self, key: str) -> list[Any]:
        value = self._get(key)
        if not isinstance(value, list):
            self.refuse(f"has no list {key}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.values(key)
        if not all(isinstance(each, str) for each in values):
            self.refuse(f"has something other than text in {key}")
        return tuple(values)

    def object(self, key: str) -> dict[str, Any]:
        value = self._get(key)
        if not isinstance(value, dict):
            self.refuse(f"has no object {key}")
        return value

    def inner(self, key: str) -> list[Reader]:
        """A list of objects."""
        return [Reader(each, self._file, f"{key}[{number}]") for number, each in enumerate(self.values(key))]

    def nested(self, value: Any, place: str) -> Reader:
        """An object that this one holds in its own way."""
        return Reader(value, self._file, place)

    def keys(self) -> Mapping[str, Any]:
        return self._value

    def _get(self, key: str) -> Any:
        if key not in self._value:
            self.refuse(f"has no {key}")
        return self._value[key]

    def _count(self, key: str, value: Any, at_most: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= at_most:
            self.refuse(f"has {key} = {str(value)[:40]}, which is no count up to {at_most}")
        return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
