"""From measurements of this machine or cluster to a cluster file.

link    t(S) = latency + S / bandwidth, through the smallest and the largest size measured
matrix  the fastest shape is the peak; what the others reach of it, on average, is the achieved share
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w

from meshwright.price.catalogue import build, calibrated_path, cluster_of
from meshwright.price.cluster import Cluster

__all__ = ["LinkTime", "Measured", "ProductTime", "calibrated", "fit", "write_cluster"]


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
    """One collective over an axis of `ranks` ranks: `moved_bytes` through each rank, `hops` one after another."""

    axis: str
    ranks: int
    hops: int
    moved_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What the ranks of a mesh found together. Rates are of one rank while all the others work too."""

    ranks: int
    device: str
    generation: str
    memory_bytes: float  # of one rank
    memory_bytes_per_s: float
    products: tuple[ProductTime, ...] = ()
    links: tuple[LinkTime, ...] = ()
    host_bytes_per_s: float = 0.0
    told: Mapping[str, str] = field(default_factory=dict)


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
    base = cluster_of("local", calibrated=False)
    tables: dict[str, Any] = {**asdict(base), "name": name}
    device, node = tables["device"], tables["node"]
    device |= {"name": found.device, "generation": found.generation, "memory_bytes": found.memory_bytes,
               "memory_bytes_per_s": found.memory_bytes_per_s, "memory_share": 1.0}  # fmt: skip
    node |= {"devices": max(found.ranks, 1)}
    sources = dict(tables["sources"]) | {"device.memory_bytes_per_s": "measured: a copy of 64 MB on every rank at once"}
    rates: dict[str, list[float]] = {}
    for product in found.products:
        rates.setdefault(product.dtype, []).append(product.flops_per_s)
    if rates:
        device["matrix_flops"] = {dtype: max(each) for dtype, each in rates.items()}
        device["matrix_share"] = {dtype: fmean(each) / max(each) for dtype, each in rates.items()}
        shapes = ", ".join(sorted({f"{each.m}x{each.n}x{each.k}" for each in found.products}))
        sources["device.matrix_flops"] = f"measured: the fastest of the shapes {shapes}, all ranks at once"
        sources["device.matrix_share"] = "measured: mean of the shapes over the fastest"
    axes = {time.axis: [each for each in found.links if each.axis == time.axis] for time in found.links}
    if axes:
        fitted = {axis: fit(times) for axis, times in axes.items()}
        latency, rate = fitted[min(fitted, key=lambda axis: fitted[axis][0])]
        slowest = min(each[1] for each in fitted.values())
        node |= {"link_latency_s": latency, "link_bytes_per_s": rate, "measured_bytes_per_s": slowest}
        words = ", ".join(f"{axis} {each[0] * 1e6:.0f} us {each[1] / 1e9:.2f} GB/s" for axis, each in fitted.items())
        sources["node.measured_bytes_per_s"] = f"measured, the slowest axis of: {words}"
        sources["node.link_bytes_per_s"] = sources["node.link_latency_s"] = "measured, the axis with the least latency"
    if found.host_bytes_per_s:
        node["host_bytes_per_s"] = found.host_bytes_per_s
    return build(tables | {"sources": {**sources, **found.told}}, name)


def write_cluster(cluster: Cluster, file: Path | None = None) -> Path:
    """Write a cluster file; without a path, the one that `local` is read from."""
    file = calibrated_path() if file is None else file
    file.parent.mkdir(parents=True, exist_ok=True)
    tables = {key: value for key, value in asdict(cluster).items() if value != {}}
    file.write_text(tomli_w.dumps(tables), encoding="utf-8")
    return file
