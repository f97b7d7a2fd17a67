"""Clusters by name or from a file: TOML, each number with its source; every key can be overridden.

cluster_of("h100-sxm", ["cluster.node.devices=4", "cluster.network.bytes_per_s=6.25e9"])
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
import warnings
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from meshwright.config.errors import RequestError
from meshwright.config.load import read_tables
from meshwright.config.overrides import parse_overrides
from meshwright.price.cluster import Cluster, Cost, Device, Network, Node, Software, year_month
from meshwright.price.constants import VALUES
from meshwright.price.here import this_machine

_MOST = 2**31 - 1  # of a count
_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8", "float4")
_RATES = ("bytes", "bytes_per_s", "gain_alone")
_SECTIONS: Mapping[str, type] = {
    "device": Device, "node": Node, "network": Network, "software": Software, "price": Cost,
}  # fmt: skip


@cache
def names() -> tuple[str, ...]:
    """The clusters of the catalogue."""
    return tuple(sorted(each.name.removesuffix(".toml") for each in _folder().iterdir() if each.name.endswith(".toml")))


def calibrated_path() -> Path:
    """Where `doctor --calibrate` writes what it measured of this machine, and `local` is read from."""
    return Path.home() / ".config" / "meshwright" / "local.toml"


def cluster_of(name: str, overrides: Sequence[str] = (), calibrated: bool = True) -> Cluster:
    """The cluster called `name`, or in the file `name`, with `cluster.section.key=value` words laid over it.

    "local" is this machine as it was measured, where it was (and `calibrated` is true).

    Raises RequestError for unknown names, keys and values, all at once.
    """
    if name == "local" and calibrated and calibrated_path().is_file():
        tables = _calibrated_tables(calibrated_path())
    elif name in names():
        tables = read_tables(Path(str(_folder() / f"{name}.toml")))
    elif name.endswith(".toml") or Path(name).is_file():
        tables = read_tables(Path(name))
    else:
        near = difflib.get_close_matches(name.lower(), names(), n=3, cutoff=0.4) or names()
        raise RequestError(f"--cluster {name}", "is no cluster of the catalogue and no file", [*near, "FILE.toml"])
    for override in parse_overrides(overrides):
        table = tables
        for part in override.key[1:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise RequestError(override.text, f"{part} is no table")
        table[override.key[-1]] = override.value
        tables.get("sources", {}).pop(".".join(override.key[1:]), None)  # the source of another value
    return build(tables, name)


def _calibrated_tables(file: Path) -> dict[str, Any]:
    """What was measured of this machine; with a warning where it was another: its rates are not this one's.

    Raises RequestError where the file is damaged.
    """
    try:
        tables = read_tables(file)
        found = build(tables, str(file))
    except RequestError as error:
        first = error.problems[0] if error.problems else error
        told = first.rule if first.value.startswith(str(file)) else f"{first.value} {first.rule}"
        rule = f"holds no measurement of this machine: {told}"
        raise RequestError(str(file), rule, ("meshwright doctor --calibrate",)) from None
    there = found.sources.get("machine")
    if there is not None and there != this_machine():
        told = f"{file} was measured on {there}; this machine is {this_machine()}"
        warnings.warn(f"{told}: `meshwright doctor --calibrate` measures it", stacklevel=3)
    return tables


def build(tables: Mapping[str, Any], name: str = "cluster") -> Cluster:
    """A cluster from plain tables. Raises RequestError."""
    problems: list[RequestError] = []
    for key in tables:
        if key not in (*_SECTIONS, "name", "constants", "sources"):
            problems.append(_unknown(f"cluster.{key}", key, _SECTIONS, "cluster."))
    parts = {key: _section(key, kind, tables.get(key, {}), problems) for key, kind in _SECTIONS.items()}
    constants = _constants(tables.get("constants", {}), problems)
    if problems:
        raise RequestError.joined(problems)
    sources = {str(key): str(value) for key, value in dict(tables.get("sources", {})).items()}
    return Cluster(str(tables.get("name", Path(name).stem)), **parts, constants=constants, sources=sources)


def _constants(table: Any, problems: list[RequestError]) -> dict[str, float]:
    """Constants of the price model by name; a name that the model does not read is an error."""
    if not isinstance(table, Mapping):
        problems.append(RequestError(f"cluster.constants = {table}", "must be a table", ("[constants]",)))
        return {}
    known: dict[str, float] = {}
    for name, value in table.items():
        if name not in VALUES:
            problems.append(_unknown(f"cluster.constants.{name}", name, VALUES, "cluster.constants."))
            continue
        try:
            known[name] = _number(f"cluster.constants.{name}", value)
        except RequestError as problem:
            problems.append(problem)
    return known


def _folder() -> Any:
    return files("meshwright.price") / "catalogue"


def _section(key: str, kind: type, table: Any, problems: list[RequestError]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    types_of = typing.get_type_hints(kind)
    if not isinstance(table, Mapping):
        problems.append(RequestError(f"cluster.{key} = {table}", "must be a table", (f"[{key}]",)))
        return None
    given: dict[str, Any] = {}
    for name, value in table.items():
        if name not in fields:
            problems.append(_unknown(f"cluster.{key}.{name}", name, fields, f"cluster.{key}."))
            continue
        try:
            given[name] = _value(f"cluster.{key}.{name}", value, types_of[name])
        except RequestError as problem:
            problems.append(problem)
    unknown_at_zero = {name for name, field in fields.items() if field.default == 0.0}
    for name, value in given.items():
        if value == 0 and name.endswith(_RATES) and name not in unknown_at_zero:
            shown = f"cluster.{key}.{name}"
            problems.append(RequestError(f"{shown} = 0", "must be above 0", (f"{shown}=1e9",)))
    missing = [name for name, field in fields.items() if _is_required(field) and name not in given]
    if missing and not any(problem.value.startswith(f"cluster.{key}") for problem in problems):
        problems.append(RequestError(f"cluster [{key}]", f"needs {', '.join(missing)}"))
    return None if problems else kind(**given)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _value(name: str, value: Any, kind: Any) -> Any:
    if typing.get_origin(kind) is not None and not isinstance(kind, types.UnionType):
        if not isinstance(value, Mapping) or not value:
            raise RequestError(f"{name} = {value}", "must be a table of rates by dtype", (f"{name}={{bfloat16=1e12}}",))
        for key in value:
            if key not in _DTYPES:
                raise _unknown(f"{name}.{key}", str(key), _DTYPES, f"{name}.", "is no dtype")
        return {str(key): _rate(f"{name}.{key}", each) for key, each in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        known = [str(each.value) for each in kind]
        if value not in known:
            raise RequestError(f'{name} = "{value}"', f"must be one of {', '.join(known)}", known[:3])
        return kind(value)
    if kind is bool:
        if not isinstance(value, bool):
            raise RequestError(f"{name} = {value}", "must be true or false", ("true", "false"))
        return value
    if kind is str:
        if name.endswith(".release") and value != "":
            year_month(str(value))
        return str(value)
    number = _number(name, value, least=-1.0 if kind is int else 0.0)
    if kind is int and (number != int(number) or (name.endswith(("devices", "processors")) and number < 1)):
        raise RequestError(f"{name} = {value}", "must be a whole number of at least 1", (f"{name} = 8",))
    if kind is int and number > _MOST:
        raise RequestError(f"{name} = {value}", f"must be at most {_MOST}", (f"{name} = 8",))
    return int(number) if kind is int else number


def _number(name: str, value: Any, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} = {value}", "must be a number", (f"{name} = 1e9",))
    if not least <= value < float("inf"):
        raise RequestError(f"{name} = {value}", "must be a finite number, not negative")
    return float(value)


def _rate(name: str, value: Any) -> float:
    number = _number(name, value)
    if number == 0:
        raise RequestError(f"{name} = {value}", "must be above 0", (f"{name}=1e12",))
    return number


def _unknown(
    shown: str, name: str, known: Iterable[str], prefix: str, rule: str = "is no key of a cluster file"
) -> RequestError:
    every = list(known)
    near = difflib.get_close_matches(name, every, n=2, cutoff=0.4) or every[:4]
    return RequestError(shown, rule, [prefix + each for each in near])
