"""The kinds of value a key may hold. Nothing is converted: ``"4"``, ``4.0`` and ``true`` are not the integer 4."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

__all__ = [
    "INTEGER_MAX",
    "Count",
    "Fraction",
    "NonNegative",
    "Number",
    "Positive",
    "PositiveNumber",
    "Section",
    "Switch",
    "Text",
]

INTEGER_MAX = 2**63 - 1  # TOML integers are 64-bit signed


class Section(BaseModel):
    """A table of the run file: frozen, without unknown keys; the text under a key is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def _whole(value: object) -> object:
    """Let a float that is a whole number (``1e9``) stand for the integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Positive = Annotated[int, Strict(), Field(ge=1, le=INTEGER_MAX)]
"""An integer of at least 1."""

NonNegative = Annotated[int, Strict(), Field(ge=0, le=INTEGER_MAX)]
"""An integer of at least 0; at most keys 0 means "off"."""

_EDITOR = {"minimum": 1, "maximum": INTEGER_MAX, "multipleOf": 1}
_WrittenCount = Annotated[float, Field(json_schema_extra=_EDITOR)]

Count = Annotated[
    int, Strict(), Field(ge=1, le=INTEGER_MAX), BeforeValidator(_whole, json_schema_input_type=_WrittenCount)
]
"""A large count, which may be written ``1e9``."""

Number = Annotated[float, Strict(), Field(ge=0)]
"""A finite number of at least 0; integers are numbers too."""

PositiveNumber = Annotated[float, Strict(), Field(gt=0)]
"""A finite number above 0."""

Fraction = Annotated[float, Strict(), Field(ge=0, lt=1)]
"""A number of at least 0 and below 1."""

Switch = Annotated[bool, Strict()]
"""``true`` or ``false``, and no other spelling."""

Text = Annotated[str, Strict(), Field(min_length=1)]
"""A string of at least one character."""
