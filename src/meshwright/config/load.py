"""From a run file and overrides to a ``RunConfig``, and back to a file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from meshwright.config.choices import Dtype
from meshwright.config.errors import RequestError
from meshwright.config.overrides import Override, parse_overrides
from meshwright.config.problems import problem_of
from meshwright.config.schema import RunConfig

__all__ = ["build_run", "change_run", "dump_run", "json_schema", "load_run", "read_tables"]

# An override of the first key takes the place of what a file says under the others of its table. Both given in one
# file, or both on one command line, are a contradiction and refused.
_TAKES_PLACE: dict[tuple[str, ...], tuple[str, ...]] = {
    ("model", "preset"): ("hf",),
    ("model", "hf"): ("preset",),
    ("train", "steps"): ("tokens",),
    ("train", "tokens"): ("steps",),
}
_DOUBLE_SETS = ("reduce", "master")  # compute = "float64" sets all three types


def load_run(path: Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and apply ``section.key=value`` overrides; without a file, the built-in demonstration run.

    Raises ``RequestError`` that tells all problems at once: nothing has been started or read by then.
    """
    parsed = parse_overrides(overrides)
    tables = {} if path is None else read_tables(path)
    return _build(_merged(tables, parsed), parsed, "" if path is None else f" in {path}")


def build_run(tables: Mapping[str, Any]) -> RunConfig:
    """Validate plain tables, as a run file holds them. Raises ``RequestError``."""
    return _build(tables, (), "")


def change_run(run: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return ``run`` with ``section.key=value`` overrides applied and everything validated again."""
    parsed = parse_overrides(overrides)
    return _build(_merged(run.tables(), parsed), parsed, "")


def dump_run(run: RunConfig) -> str:
    """Write a run as TOML with every choice made; reading it again gives an equal run."""
    return tomli_w.dumps(run.tables())


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of run files, for editors."""
    schema = RunConfig.model_json_schema(by_alias=True)
    for table in (schema, *schema["$defs"].values()):
        for key in table.get("properties", {}).values():
            if isinstance(key.get("default"), dict) or key.get("default", 0) is None:
                del key["default"]  # a table's keys tell their own; TOML has no null
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Meshwright run file",
        "description": "What one training run does. Every key is optional.",
    }


def read_tables(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises ``RequestError`` with the line where it is not TOML."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise RequestError(f"{path}, line {line}", "is not text in UTF-8", ("save the file as UTF-8",)) from None
    except IsADirectoryError:
        inside = path / "run.toml"
        raise RequestError(
            str(path), "is a folder; a run file is wanted", (str(inside),) if inside.is_file() else ()
        ) from None
    except FileNotFoundError:
        files = path.parent.glob("*.toml") if path.parent.is_dir() else ()
        beside = sorted(str(each) for each in files if each.name != "pyproject.toml")[:3]
        raise RequestError(str(path), "there is no such file", beside) from None
    except OSError as error:
        raise RequestError(str(path), f"cannot be read: {error.strerror or error}") from None
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError as error:
        raise _not_toml(path, text, str(error)) from None
    except (ValueError, RecursionError) as error:  # whole numbers of thousands of digits, brackets in thousands
        raise RequestError(str(path), f"cannot be read as TOML: {error}") from None


def _not_toml(path: Path, text: str, reason: str) -> RequestError:
    """Place a TOML error: file, line, column and the line itself."""
    what, _, place = reason.partition(" (at ")
    where = re.match(r"line (\d+), column (\d+)", place)
    lines = text.splitlines()
    number = int(where[1]) if where else len(lines)
    column = f", column {where[2]}" if where else ""
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    shown = f" in `{line}`" if line else ""
    if "overwrite" in what or "twice" in what:
        what = f"this key or table was already given above ({what})"
    return RequestError(f"{path}, line {number}{column}", f"is not TOML: {what}{shown}")


def _build(tables: Mapping[str, Any], overrides: Sequence[Override], source: str) -> RunConfig:
    typed = {override.name for override in overrides}

    def origin(key: str) -> str:
        return "" if key in typed else source

    try:
        return RunConfig.model_validate(tables)
    except ValidationError as error:
        raise problem_of(error, tables, origin) from None


def _merged(tables: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Return ``tables`` with the overrides laid over them, later ones over earlier ones."""
    merged: dict[str, Any] = _copied(tables)
    for override in overrides:
        displaced = _TAKES_PLACE.get(override.key, ())
        if override.key == ("precision", "compute") and override.value == Dtype.FLOAT64:
            displaced = _DOUBLE_SETS
        section = merged.get(override.key[0])
        if isinstance(section, dict):
            merged[override.key[0]] = {key: value for key, value in section.items() if key not in displaced}
    for override in overrides:
        _lay(merged, override.key, override.value)
    return merged


def _copied(value: Any) -> Any:
    return {key: _copied(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def _lay(merged: dict[str, Any], key: Sequence[str], value: Any) -> None:
    *path, last = key
    table = merged
    for part in path:
        if not isinstance(table.get(part), dict):
            table[part] = {}
        table = table[part]
    table[last] = value
