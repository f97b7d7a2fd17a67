"""A plan out of a manifest, and what two plans would train differently."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, TypeVar

from meshwright.arch.checks import check_arch
from meshwright.checkpoint.errors import CheckpointError, DamagedError
from meshwright.checkpoint.strict import Reader
from meshwright.config.choices import Family
from meshwright.layout.axes import Axis
from meshwright.plan.hash import plain
from meshwright.plan.plan import Plan
from meshwright.plan.rules import check_plan

__all__ = ["differences", "layout_from", "plan_from", "plan_to_json"]

T = TypeVar("T")

_LAYOUT = frozenset(
    ["name", "degrees", "sharding", "pipeline", "context", "execution", "batch.micro", "start.folder", "data.source"]
)
"""Fields that decide no loss: see `Plan.math`."""
_MOST_TOLD = 400
_LAST_STAGE = 3
"""Of ZeRO."""
_KEYS = {"batch.sequences": "batch.global", "optimizer.steps": "train.steps"}


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values."""
    value = plain(plan)
    assert isinstance(value, dict)
    return value


def plan_from(value: Mapping[str, Any], file: str) -> Plan:
    """The plan that `plan_to_json` told. Raises DamagedError where `value` is none."""
    if "module" in value:
        raise CheckpointError(f"{file} is of a module under data_parallel, not of a decoder: checkpoint.load takes it")
    try:
        plan: Plan = _read(Plan, value)
        check_arch(plan.arch)
        Family(plan.arch.family)
        check_plan(plan)
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise DamagedError(file, f"holds no plan: {_short(str(error))}") from None
    return plan


def layout_from(value: Mapping[str, Any], file: str) -> tuple[dict[str, int], int]:
    """The degree of each axis and the ZeRO stage that a plan, or what `data_parallel` told, was saved on.

    Reads no more of it: a checkpoint whose plan has fields of another release can be looked at. Raises DamagedError
    where `value` has no layout.
    """
    reader = Reader(value, file, "the plan")
    degrees = reader.nested(reader.object("degrees"), "the plan's degrees")
    stage = reader.nested(reader.object("sharding"), "the plan's sharding").count("stage", _LAST_STAGE)
    found = {axis.value: degrees.count(axis.value) for axis in Axis}
    for name, degree in found.items():
        if not degree:
            degrees.refuse(f"has {name} = 0: a degree is at least 1")
    return found, stage


def differences(saved: Mapping[str, Any], plan: Plan) -> list[str]:
    """A line `section.key: saved -> asked` for each field that decides the loss curve and is not equal."""
    before, after = dict(_leaves(saved)), dict(_leaves(plan_to_json(plan)))
    if "bytes" not in (before.get("data.tokenizer"), after.get("data.tokenizer")):
        before["data.tokenizer"] = after["data.tokenizer"]  # both from files, whose place decides nothing
    return [
        f"{_key_of(key)}: {_told(before.get(key, 'absent'))} -> {_told(after.get(key, 'absent'))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not _is_layout(key)
    ]


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def _key_of(field: str) -> str:
    """The key of a run file that decides a field of the plan."""
    section, _, name = field.partition(".")
    return _KEYS.get(field) or (f"model.{name}" if section == "arch" else field)


def _is_layout(key: str) -> bool:
    return key in _LAYOUT or key.partition(".")[0] in _LAYOUT


def _told(value: Any) -> str:
    return _short(repr(value) if isinstance(value, str) else str(value))


def _short(text: str) -> str:
    """What a file says may be of any length; a message is not."""
    return text if len(text) <= _MOST_TOLD else f"{text[:_MOST_TOLD]}..."


def _read(kind: Any, value: Any) -> Any:
    """`value`, from JSON, as the frozen data that `kind` says."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        known = {field.name for field in dataclasses.fields(kind)}
        if not isinstance(value, Mapping):
            raise TypeError(f"{kind.__name__} is no object")
        if unknown := sorted(value.keys() - known):
            raise TypeError(f"{kind.__name__} has unknown field {unknown[0]}")
        return kind(**{name: _read(hints[name], each) for name, each in value.items()})
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _read(next(each for each in inner if each is not type(None)), value)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is no list")
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(_read(inner[0], each) for each in value)
        return tuple(_read(each, item) for each, item in zip(inner, value, strict=True))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
