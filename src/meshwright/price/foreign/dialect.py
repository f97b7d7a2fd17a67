"""What a format is: two pure functions between its text and a run's keys, and the differences in meaning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from meshwright.arch.arch import Arch
from meshwright.config.errors import RequestError
from meshwright.config.schema import RunConfig

__all__ = [
    "Dialect",
    "Format",
    "Keys",
    "Reading",
    "Source",
    "check_spoken",
    "number",
    "parsed",
    "ratio_of",
    "refuse",
    "sharded",
    "table",
    "unread",
    "whole",
]

Keys = dict[str, Any]
"""`section.key` -> value, as in a run file."""


_SHOWN = 120  # characters of a value that a message repeats


class Format(StrEnum):
    """Formats by the names that users type."""

    MESHWRIGHT = "meshwright"
    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    DEEPSPEED = "deepspeed"
    ACCELERATE = "accelerate"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a text says: keys of a run, and remarks on what its words mean otherwise or leave unsaid."""

    keys: Keys
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """What is written: the run, its model, its degrees (dp resolved), and the blocks of each virtual stage."""

    run: RunConfig
    arch: Arch
    degrees: Mapping[str, int]
    stages: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        out = 1
        for size in self.degrees.values():
            out *= size
        return out

    @property
    def replicas(self) -> int:
        return self.degrees["dp"] * self.degrees["ep"] * self.degrees["cp"]

    @property
    def accumulation(self) -> int:
        return self.run.batch.global_ // (self.run.batch.micro * self.degrees["dp"] * self.degrees["ep"])


@dataclass(frozen=True, slots=True)
class Dialect:
    """`read`: of a text, on so many ranks where they are known. `sections`: what of a run the format is about at all;
    the rest is not listed as lost key by key."""

    read: Callable[[str, int | None], Reading]
    write: Callable[[Source], str]
    differences: Callable[[Source], list[str]]
    sections: frozenset[str]
    unspoken: tuple[str, ...] = ()  # axes of the mesh that it has no word for


def sharded(source: Source) -> int:
    """Data-parallel ranks that share one copy of the parameters, ZeRO-3's group less the context axis, which other
    trainers shard over as a whole. Raises RequestError where the group is no multiple of it."""
    within, cp = source.run.parallel.zero_shard_within or source.replicas, source.degrees["cp"]
    if within % cp:
        rule = f"must be a multiple of mesh.cp = {cp}, over which it shards as a whole"
        raise RequestError(f"parallel.zero_shard_within = {within}", rule, (f"parallel.zero_shard_within={cp}",))
    if source.replicas % within:
        rule = f"must divide the {source.replicas} replicas"
        raise RequestError(f"parallel.zero_shard_within = {within}", rule, ("parallel.zero_shard_within=0",))
    return within // cp


def table(format_: Format, given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The table called `name`, empty where it is not given. Raises RequestError for what is no table."""
    value = given.get(name) or {}
    if not isinstance(value, Mapping):
        raise refuse(format_, f"{name}: {value}", "wants a table there")
    return value


def whole(format_: Format, name: str, value: Any, least: int = 1) -> int:
    """A whole number of at least `least`. Raises RequestError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refuse(format_, f"{name}: {value}", f"wants a whole number of at least {least} there")
    return value


def number(format_: Format, name: str, value: Any) -> float:
    """A finite number. Raises RequestError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise refuse(format_, f"{name}: {value}", "wants a number there")
    return value


def ratio_of(part: float, whole_: float) -> float:
    """`part` as a share of `whole_`, such that the product is `part` again where there is such a float."""
    if not whole_:
        return 0.0
    ratio = part / whole_
    near = ratio, math.nextafter(ratio, 0.0), math.nextafter(ratio, math.inf)
    return next((each for each in near if each * whole_ == part), ratio)


def unread(names: Iterable[str]) -> tuple[str, ...]:
    """The remark on words that a reader leaves alone; none where there are none."""
    every = ", ".join(sorted(names))
    return (f"not read: {every}",) if every else ()


def check_spoken(format_: Format, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises RequestError where a file has no word of the format: it is of another, and would be read as nothing.

    `known`: the words to look for first.
    """
    every = list(known)
    if set(every).isdisjoint(names):
        raise RequestError("the file", f"has no word of {format_.value}", every[:3])


def parsed(parse: Callable[[str], Any], text: str, language: str) -> Any:
    """What a parser makes of a text. Raises RequestError, for whole numbers of thousands of digits and brackets in
    thousands too."""
    try:
        return parse(text.removeprefix("\ufeff"))
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise RequestError("the file", f"is no {language}: {error}") from None


def refuse(format_: Format, named: str, rule: str, works: tuple[str, ...] = ()) -> RequestError:
    """What a format cannot express, by name."""
    shown = named if len(named) <= _SHOWN else f"{named[:_SHOWN]}..."
    return RequestError(shown, f"{format_.value} {rule}", works)
