"""What a validator found, told for people: the key, the value, the rule and what works."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshwright.config.errors import RequestError
from meshwright.config.keys import Key, key_of, nearest_keys
from meshwright.config.schema import RunConfig

__all__ = ["problem_of", "shown"]

_WIDEST_BITS = 256


def problem_of(error: ValidationError, tables: Mapping[str, Any], origin: Callable[[str], str]) -> RequestError:
    """Turn the failed validation of ``tables`` into one ``RequestError`` that holds one problem a key.

    ``origin(key)`` says where a key's value came from (``" in run.toml"``, or nothing for an override).
    """
    by_key: dict[Key, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_key.setdefault(key_of(details["loc"]), []).append(details)
    return RequestError.joined(_problem(key, details, tables, origin) for key, details in by_key.items())


def shown(value: object) -> str:
    """Write a value as TOML does."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(shown(each) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {shown(each)}' for key, each in value.items())}}}"
    if isinstance(value, int) and value.bit_length() > _WIDEST_BITS:
        return f"{hex(value):.20}.."  # Python writes no decimal of thousands of digits
    return str(value)


def _problem(
    key: Key, details: Sequence[ErrorDetails], tables: Mapping[str, Any], origin: Callable[[str], str]
) -> RequestError:
    first, name = details[0], ".".join(key)
    refusal = first.get("ctx", {}).get("error")
    if isinstance(refusal, RequestError):
        return refusal
    if first["type"] == "extra_forbidden":
        place = f"[{'.'.join(key[:-1])}]" if len(key) > 1 else "a run file"
        return RequestError(name, f"is no key of {place}{origin(name)}", nearest_keys(key))
    if first["type"] == "missing" and first["loc"] == key:
        return RequestError(name, f"is needed beside the other keys of [{'.'.join(key[:-1])}]")
    rules = list(dict.fromkeys(_rule(each) for each in details))
    element = f"{shown(first['input'])} " if len(details) == 1 and _is_element(first, key) else ""
    return RequestError(
        f"{name} = {shown(_lookup(tables, key))}{origin(name)}",
        f"{element}must be {' or '.join(rules)}",
        tuple(dict.fromkeys(_nearest(details, key))),
    )


def _is_element(details: ErrorDetails, key: Key) -> bool:
    return details["type"] != "missing" and any(isinstance(part, int) for part in details["loc"][len(key) :])


def _rule(details: ErrorDetails) -> str:
    """Complete the sentence "must be ..."."""
    context = details.get("ctx", {})
    match details["type"]:
        case "int_type" | "int_from_float" | "int_parsing" | "int_parsing_size":
            return "an integer"
        case "float_type":
            return "finite" if _is_beyond(details["input"]) else "a number"
        case "finite_number":
            return "finite"
        case "bool_type":
            return "true or false"
        case "string_type":
            return "a string"
        case "string_unicode":
            return "text in UTF-8"
        case "string_too_short":
            return "a string of at least one character"
        case "greater_than_equal":
            return f"at least {_bound(context['ge'])}"
        case "greater_than":
            return f"above {_bound(context['gt'])}"
        case "less_than_equal":
            return f"at most {_bound(context['le'])}"
        case "less_than":
            return f"below {_bound(context['lt'])}"
        case "enum":
            return " or ".join(f'"{choice}"' for choice in _choices(details))
        case "tuple_type":
            return "a list"
        case "missing":
            return f"a list of {int(details['loc'][-1]) + 1} values"
        case "too_long":
            return f"a list of {context['max_length']} values"
        case "too_short":
            return f"a list of at least {context['min_length']} value"
        case "model_type":
            return "a table"
    return f"as the validator says: {details['msg']}"


def _bound(bound: float) -> str:
    return str(int(bound) if bound == int(bound) else bound)


def _choices(details: ErrorDetails) -> list[str]:
    """Return the values of the enum that refused; pydantic words them ``'a', 'b' or 'c'``."""
    expected = str(details.get("ctx", {}).get("expected", ""))
    return [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]


def _nearest(details: Sequence[ErrorDetails], key: Key) -> Iterator[str]:
    """Yield values near the given ones that this key really accepts; its default where none is near."""
    found = False
    for each in details:
        alone = each["loc"] == key or len(details) > 1
        for candidate in _candidates(each):
            if not alone or _works(key, candidate):
                found = True
                yield shown(candidate)
    default = _lookup(RunConfig().tables(), key)
    if not found and default is not None:
        yield f"{shown(default)}, the default"


def _candidates(details: ErrorDetails) -> Iterator[object]:
    given, context = details["input"], details.get("ctx", {})
    match details["type"]:
        case "int_type" | "int_from_float" | "float_type":
            number = _number(given)
            if number is not None and details["type"] == "float_type":
                yield number
            elif number is not None:
                yield from (math.floor(number), math.ceil(number))
        case "bool_type":
            spelt = str(given).lower()
            yield from (True,) if spelt in {"true", "yes", "on", "1"} else ()
            yield from (False,) if spelt in {"false", "no", "off", "0"} else ()
        case "string_type" if isinstance(given, (int, float)):
            yield shown(given)
        case "greater_than_equal":
            yield context["ge"]
        case "less_than_equal":
            yield context["le"]
        case "enum" if isinstance(given, str):
            yield from difflib.get_close_matches(given.lower(), _choices(details), n=1, cutoff=0.5)


def _number(given: object) -> float | None:
    """Read the number somebody meant by a float, a switch or a string."""
    try:
        number = float(given) if isinstance(given, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _is_beyond(given: object) -> bool:
    """Whether this is a whole number that no float holds."""
    return isinstance(given, int) and abs(given) > sys.float_info.max


def _works(key: Key, candidate: object) -> bool:
    tables: Any = candidate
    for part in reversed(key):
        tables = {part: tables}
    try:
        RunConfig.model_validate(tables)
    except ValidationError as error:
        return all(key_of(details["loc"]) != key for details in error.errors(include_url=False))
    return True


def _lookup(tables: Mapping[str, Any], key: Key) -> Any:
    value: Any = tables
    for part in key:
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value
