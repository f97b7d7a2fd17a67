"""What a search found: layouts as keys of a run with their prices, in order. Data, made by `search.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from meshwright.config.load import build_run
from meshwright.config.schema import RunConfig
from meshwright.layout.axes import DEFAULT_ORDER
from meshwright.price.cluster import Cluster
from meshwright.price.legal import AXES, Mesh, Refusal
from meshwright.price.price import Price

__all__ = ["By", "Ranking", "Row", "degrees_words", "mesh_of", "short", "unbeaten", "with_keys"]


class By(StrEnum):
    """What layouts are ranked by."""

    TIME = "time"
    COST = "cost"
    MEMORY = "memory"

    def ordered(self, rows: Iterable[Row]) -> list[Row]:
        """Best first; what costs the same time (or memory), with less memory (or time) first."""
        return sorted(
            rows, key=lambda row: (row.memory, row.seconds) if self is By.MEMORY else (row.seconds, row.memory)
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A ranked layout: the run's keys that make it, and its price."""

    keys: Mapping[str, Any]
    price: Price

    @property
    def seconds(self) -> float:
        return self.price.step_seconds

    @property
    def memory(self) -> int:
        """Bytes of the fullest rank at its fullest."""
        return self.price.memory["peak"]

    @property
    def words(self) -> list[str]:
        """`section.key=value`, as one would type them."""
        return [f"{key}={_word(value)}" for key, value in self.keys.items()]

    def to_json(self, rank: int) -> dict[str, Any]:
        tables: dict[str, dict[str, Any]] = {"mesh": {}, "parallel": {}, "batch": {}}
        for key, value in self.keys.items():
            section, name = key.split(".")
            tables[section][name] = value
        price = self.price
        return {"rank": rank, **tables, "memory_peak": self.memory, "step_seconds": self.seconds,
                "mfu": price.mfu, "cost": price.dollars_per_step}  # fmt: skip


@dataclass(frozen=True)
class Ranking:
    """What a search found. `rows` are the best, `pareto` those that nothing beats in both time and memory."""

    run: RunConfig
    cluster: Cluster
    gpus: int
    by: By
    rows: tuple[Row, ...]
    pareto: tuple[Row, ...]
    refused: tuple[Refusal, ...]
    counts: Mapping[str, int]
    seconds: float
    best_of: Mapping[Mesh, tuple[float, float]] = field(default_factory=dict)
    """Of every mesh with a layout that fits: the least seconds, and the bytes of that layout."""
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> Row:
        return self.rows[0]


def unbeaten(rows: Iterable[Row]) -> Iterator[Row]:
    """Those that no other beats in both time and memory, the fastest first."""
    least = math.inf
    for row in By.TIME.ordered(rows):
        if row.memory < least:
            least = row.memory
            yield row


def with_keys(run: RunConfig, keys: Mapping[str, Any]) -> RunConfig:
    """The run with other keys."""
    tables = run.tables()
    for key, value in keys.items():
        section, name = key.split(".")
        tables[section][name] = value
    return build_run(tables)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else str(value)


def mesh_of(keys: Mapping[str, Any]) -> Mesh:
    """The degrees among a run's keys."""
    dp, tp, pp, cp, ep = (int(keys[f"mesh.{name}"]) for name in AXES)
    return dp, tp, pp, cp, ep


def degrees_words(mesh: Mesh) -> str:
    """`dp 2 x tp 4`."""
    return " x ".join(f"{name} {size}" for name, size in zip(AXES, mesh, strict=True) if size > 1) or "one rank"


def short(keys: Mapping[str, Any]) -> str:
    """A layout in a few words."""
    words = [degrees_words(mesh_of(keys))]
    if keys["parallel.zero"]:
        words.append(f"ZeRO-{keys['parallel.zero']}")
        if keys["parallel.zero_shard_within"]:
            words[-1] += f" within {keys['parallel.zero_shard_within']}"
        if not keys["parallel.reshard_after_forward"]:
            words[-1] += " kept gathered"
    if keys["mesh.pp"] > 1:
        chunks = f" x {keys['parallel.chunks']}" if keys["parallel.chunks"] > 1 else ""
        words.append(f"{keys['parallel.schedule']}{chunks}")
    if keys["mesh.cp"] > 1:
        inner = keys["parallel.context_inner"]
        words.append(str(keys["parallel.context"]) + (f" over ulysses groups of {inner}" if inner > 1 else ""))
    if keys["mesh.tp"] > 1 and not keys["parallel.sequence"]:
        words.append("without sequence parallel")
    if keys["parallel.recompute"] != "none":
        words.append(f"{keys['parallel.recompute']} recompute")
    if keys["parallel.offload"] != "none":
        words.append(f"{keys['parallel.offload']} elsewhere")
    words.append(f"micro-batch {keys['batch.micro']}")
    active = [axis for axis in keys["mesh.order"] if keys[f"mesh.{axis}"] > 1]
    if active != [axis.value for axis in DEFAULT_ORDER if axis.value in active]:
        words.append(f"order {' '.join(active)}")
    return ", ".join(words)
