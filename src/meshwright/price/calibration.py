"""From measurements of this machine or cluster to a cluster file.

link    t(S) = latency + S / bandwidth, through the smallest and the largest size measured
matrix  t(m, n, k) = 2 m n k / rate (1 + ramp / k), through all shapes measured
units   constants of the price model that make it give the seconds of whole blocks, heads and updates (`rates.py`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from meshwright.config.errors import RequestError
from meshwright.config.whole import check_writable, write_whole
from meshwright.plan.plan import Plan
from meshwright.price.catalogue import build, calibrated_path, cluster_of
from meshwright.price.cluster import Cluster
from meshwright.price.here import this_machine

__all__ = [
    "LinkTime", "Measured", "OverlapTime", "ProductTime", "UnitTime", "calibrated", "fit", "writable_place",
    "write_cluster",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProductTime:
    """(m, k) x (k, n) took `seconds` on each of the ranks at once."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float

    @property
    def flops_per_s(self) -> float:
        return 2 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True, slots=True)
class LinkTime:
    """One collective over an axis of `ranks` ranks: `moved_bytes` through each rank, `hops` one after another.

    `axis`: of a mesh, or a tier: "inside" a node, "across" nodes, "alone" (across, while other devices wait).
    """

    axis: str
    ranks: int
    hops: int
    moved_bytes: int
    seconds: float
    operation: str = "all_gather"
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class OverlapTime:
    """Products and an all-reduce on a tier, each alone and both begun together."""

    axis: str
    compute_s: float
    link_s: float
    together_s: float

    @property
    def slow(self) -> float:
        """What doing both at once costs, as a share of the shorter: 0 where it hides, 1 where nothing does."""
        shorter, longer = sorted((self.compute_s, self.link_s))
        return min(max((self.together_s - longer) / shorter, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class UnitTime:
    """A unit of the model on `tokens` tokens ("embedding", "block", "head", or "attention", its core alone), or the
    "update" of so many elements, on each of the ranks at once."""

    unit: str
    tokens: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What the ranks of a mesh found together. Rates are of one rank while all the others work too.

    `devices`: ranks of a node. `gain_alone`: how much faster a rank computes while the others of its node wait.
    `plan`: of the run whose units were timed.
    """

    ranks: int
    device: str
    generation: str
    memory_bytes: float  # of one rank
    memory_bytes_per_s: float
    products: tuple[ProductTime, ...] = ()
    links: tuple[LinkTime, ...] = ()
    host_bytes_per_s: float = 0.0
    told: Mapping[str, str] = field(default_factory=dict)
    devices: int = 0
    units: tuple[UnitTime, ...] = ()
    gain_alone: float = 1.0
    overlaps: tuple[OverlapTime, ...] = ()
    plan: Plan | None = None


def fit(times: Sequence[LinkTime]) -> tuple[float, float]:
    """(seconds of a hop, bytes a second) of one axis, from its smallest and largest size."""
    small, large = min(times, key=_size), max(times, key=_size)
    slope = (large.seconds - small.seconds) / max(large.moved_bytes - small.moved_bytes, 1)
    slope = max(slope, 0.5 * large.seconds / large.moved_bytes)  # latency is not most of a large message's time
    latency = max(small.seconds - small.moved_bytes * slope, 0.0)
    return latency / small.hops, 1 / slope


def _size(time: LinkTime) -> int:
    return time.moved_bytes


def calibrated(found: Measured, name: str = "local") -> Cluster:
    """The cluster that was measured; what cannot be measured is as in the catalogue's nearest."""
    from meshwright.price.rates import link_tables, matrix_tables, unit_constants

    tables: dict[str, Any] = {**asdict(cluster_of("local", calibrated=False)), "name": name}
    sources = dict(tables["sources"]) | {
        "machine": this_machine(),
        "device.memory_bytes": "of the machine, by the system, and of each rank on it as much",
        "device.matrix_share": "measured rates are whole",
        "device.memory_bytes_per_s": "measured: a copy of 64 MB on every rank at once",
    }
    tables["device"] |= {"name": found.device, "generation": found.generation, "memory_bytes": found.memory_bytes,
                         "memory_bytes_per_s": found.memory_bytes_per_s, "memory_share": 1.0}  # fmt: skip
    tables["node"] |= {"devices": max(found.devices or found.ranks, 1), "gain_alone": found.gain_alone}
    constants: dict[str, float] = {}
    for part in (matrix_tables(found), link_tables(found)):
        for section in ("device", "node", "network"):
            tables[section] |= part.get(section, {})
        constants |= part.get("constants", {})
        sources |= part.get("sources", {})
    if found.host_bytes_per_s:
        tables["node"]["host_bytes_per_s"] = found.host_bytes_per_s
    cluster = build(tables | {"constants": constants, "sources": {**sources, **found.told}}, name)
    if found.plan is None or not found.units:
        return cluster
    more, share = unit_constants(found, cluster)
    told = f"measured: units of {found.plan.name} on every rank at once, with the constants"
    return replace(
        cluster,
        device=replace(cluster.device, memory_share=share),
        constants={**cluster.constants, **more},
        sources={**cluster.sources, "device.memory_share": told},
    )


def write_cluster(cluster: Cluster, file: Path | None = None) -> Path:
    """Write a cluster file, whole or not at all; without a path, the one that `local` is read from.

    Raises RequestError where it cannot be written.
    """
    file = writable_place(file)
    tables = {key: value for key, value in asdict(cluster).items() if value != {}}
    write_whole(file, tomli_w.dumps(tables))
    return file


def writable_place(file: Path | None = None) -> Path:
    """`file`, or the one that `local` is read from, whose folder is made. Raises RequestError where it cannot be
    written: asked before minutes of measuring."""
    file = calibrated_path() if file is None else file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise RequestError(str(file), rule, ("--out FILE",)) from None
    check_writable(file)
    return file
