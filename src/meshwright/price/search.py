"""Every legal layout of a model on N devices, priced and ranked.

    meshes x orders     groups of layouts that share degrees and links
      x within          what a unit costs: priced once for all layouts that share it
      x around          ZeRO, schedule, recomputation: priced over arrays

Groups are priced in the order of what no layout of theirs can be better than (the work of the fullest stage alone; for
`by = memory`, the most frugal options). Once enough points are priced, groups that cannot reach the best are left out.
Layouts that do not fit are tried with their states elsewhere: one that fits is never faster for it.

The first of the ranking are then resolved as runs and priced again as `estimate` does; the order is that of those.

A layout fits where the software that is priced holds it, and where `meshwright train`, if it runs such a layout, holds
it too: in closed form here, by the fold of its program for what is shown.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshwright.arch.resolve import arch_from_model
from meshwright.config.choices import Offload
from meshwright.config.errors import RequestError
from meshwright.config.schema import RunConfig
from meshwright.plan.front import Request, run_of
from meshwright.plan.plan import Optimizer, Precision
from meshwright.price import legal
from meshwright.price.candidates import (
    Group,
    groups_of,
    keys_of,
    known,
    least_bytes,
    offloads,
    points_of,
)
from meshwright.price.catalogue import cluster_of
from meshwright.price.cluster import Cluster
from meshwright.price.holdings import NEAR, Holdings
from meshwright.price.layouts import OFFLOADS, Array
from meshwright.price.legal import Mesh, Refusal, Space
from meshwright.price.memory import reserved_bytes
from meshwright.price.nothing import nothing_fits, nothing_legal
from meshwright.price.price import Price
from meshwright.price.ranking import By, Ranking, Row, unbeaten, with_keys
from meshwright.price.request import planned
from meshwright.price.target import Target
from meshwright.price.text import bytes_text
from meshwright.price.times import PARTS, times
from meshwright.price.weights import weights

BUDGET = 2_500_000
_BLOCK = 16_384
_SPARE = 3  # how many more layouts than asked for are priced again as runs
_TRIES = 20  # how often as many, where the program's fold says that they do not fit


@dataclass
class _Found:
    """Points that fit, in columns; `group`, `inside` and `outside` say which layout each is."""

    columns: dict[str, list[np.ndarray]] = field(
        default_factory=lambda: {name: [] for name in ("step", "bytes", "group", "inside", "outside", "offload")}
    )
    priced: int = 0
    fitting: int = 0
    moved: int = 0
    """Of the priced: layouts tried again with their states elsewhere, which no group enumerates."""

    def add(self, **columns: np.ndarray) -> None:
        for name, column in columns.items():
            self.columns[name].append(column)
        self.fitting += len(columns["step"])

    def joined(self) -> dict[str, np.ndarray]:
        return {name: np.concatenate(parts) if parts else np.zeros(0) for name, parts in self.columns.items()}


def search(
    run: Request, gpus: int, cluster: str | Cluster = "local", by: By | str = By.TIME, *, top: int = 10,
    fixed: Mapping[str, Any] | None = None, budget: int = BUDGET, suggest: bool = True,
    rates: Mapping[str, float] | None = None,
) -> Ranking:  # fmt: skip
    """Rank the layouts of `run` on `gpus` devices.

    `fixed`: keys of [mesh], [parallel] and [batch] that stay as they are given. At least `budget` points are priced
    where there are as many. Raises RequestError where the request is wrong or no layout is legal and fits; with
    `suggest` it names changed requests that have one. `rates`: measured over predicted seconds by part of a step; the
    layouts that are the fastest at these rates are found, though each row's price is still the predicted one.
    """
    begin = time.perf_counter()
    run, by = run_of(run), By(by)
    where = cluster if isinstance(cluster, Cluster) else cluster_of(cluster)
    space = replace(space_of(run, gpus, where, fixed or {}), rates=rates or {})
    check_stages(space)
    groups, refused, enumerated = groups_of(space)

    def fits(more: int, keys: Mapping[str, Any]) -> bool:
        with contextlib.suppress(RequestError):
            return bool(search(run, more, where, By.MEMORY, top=1, fixed=keys, budget=0, suggest=False).rows)
        return False

    if not groups:
        raise nothing_legal(space, refused, suggest)
    found, overfull = _price(space, groups, by, top, budget)
    if not found.fitting:
        raise nothing_fits(space, groups, fits if suggest else None)
    points = found.joined()
    shown = _Shown(run, space, groups, points)
    fastest = _order(points, By.TIME)
    rows = _first_rows(shown, fastest if by is not By.MEMORY else _order(points, by), by, top)
    if not rows:
        raise nothing_fits(space, groups, fits if suggest else None)
    front = (row for row in shown.rows(_front(points, fastest), By.TIME) if row.price.fits_trained)
    counts = {
        "enumerated": enumerated + found.moved,
        "legal": enumerated - sum(each.count for each in refused) + found.moved,
        "fitting": found.fitting,
        "priced": found.priced,
    }
    best_of = _best_of(groups, points)
    refused += _overfull(space, overfull, best_of)
    return Ranking(
        run, where, gpus, by, tuple(rows), tuple(unbeaten([*rows, *front])), tuple(refused), counts,
        time.perf_counter() - begin, best_of, fixed or {},
    )  # fmt: skip


def space_of(run: RunConfig, gpus: int, cluster: Cluster, fixed: Mapping[str, Any]) -> Space:
    """What is searched for a run."""
    precision = Precision(run.precision.compute, run.precision.reduce, run.precision.master)
    moments = Optimizer(run.optimizer.kind).num_moments
    target = Target(arch_from_model(run.model), run.data.sequence_length, precision, cluster, num_moments=moments)
    always = {"parallel.asynchronous_tensor": run.parallel.asynchronous_tensor}
    return Space(target, gpus, run.batch.global_, {**always, **fixed}, split=not run.parallel.compile)


def check_stages(space: Space) -> None:
    """Raises RequestError where stages that stay as they are do not hold each block once."""
    stages, layers = space.fixed.get("parallel.stages"), space.target.arch.layers
    if stages and sum(stages) != layers:
        rule = f"must hold each of the {layers} blocks once"
        raise RequestError(f"parallel.stages = {stages} (sum {sum(stages)})", rule, ('parallel.stages = "balanced"',))


# ---------------------------------------------------------------------------------------------- prices


def _price(
    space: Space, groups: list[Group], by: By, top: int, budget: int
) -> tuple[_Found, dict[Mesh, tuple[int, float]]]:
    """Price groups, the most promising first; with the layouts that did not fit, by mesh, and the least they need."""
    found, holdings = _Found(), Holdings(space)
    best: np.ndarray = np.full(top * _SPARE, np.inf)
    overfull: dict[Mesh, tuple[int, float]] = {}
    least_rate = min(space.rates.values(), default=1.0)  # a bound of seconds is still one at the least rate
    ahead = [
        float(group.bound.min()) * least_rate if by is not By.MEMORY else least_bytes(space, group) for group in groups
    ]
    for number in np.argsort(ahead, kind="stable"):
        group = groups[number]
        worth = np.arange(len(group.bound))
        if found.priced >= budget:
            if ahead[number] > best[-1]:
                break
            if by is not By.MEMORY:
                worth = worth[group.bound * least_rate <= best[-1]]
        for inside, outside in _blocks(group, worth, space):
            reached, failed, least = _price_block(space, group, int(number), inside, outside, holdings, found)
            value = reached["bytes" if by is By.MEMORY else "step"]
            best = np.sort(np.concatenate([best, value]))[: len(best)] if len(value) else best
            count, low = overfull.get(group.mesh, (0, np.inf))
            overfull[group.mesh] = count + failed, min(low, least)
    return found, overfull


def _blocks(group: Group, worth: np.ndarray, space: Space) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs (inside, outside) of a group's layouts whose prices the closed forms know, in blocks."""
    step = max(_BLOCK // len(group.outside["zero"]), 1)
    for start in range(0, len(worth), step):
        some = worth[start : start + step]
        inside, outside = np.nonzero(known(space, group, some))
        if len(inside):
            yield some[inside], outside


def _price_block(
    space: Space, group: Group, number: int, inside: np.ndarray, outside: np.ndarray, holdings: Holdings, found: _Found
) -> tuple[dict[str, np.ndarray], int, float]:
    """Price some layouts; returns those that fit, how many do not, and the least bytes of all."""
    asked = OFFLOADS.index(Offload(space.fixed.get("parallel.offload", Offload.NONE)))
    room, held = space.target.cluster.device.memory_bytes, holdings.of(group, inside, outside, asked)
    fits = (held.reserved <= holdings.near) & (held.trained <= room * NEAR)
    surely = (held.reserved <= room) & (held.trained <= room)
    found.priced += len(inside)
    failed = int((~fits).sum())
    kept = [_reached(space, group, number, inside[fits], outside[fits], asked, held.reserved[fits])]
    if "parallel.offload" not in space.fixed and not surely.all():
        zero, reshard = (group.outside[name][outside] for name in ("zero", "reshard"))
        for kind, away in ((Offload.OPTIMIZER, held.optimizer), (Offload.PARAMS, held.parameters)):
            able = ~surely & (away > 0) & (reserved_bytes(space.target, held.peak - away) <= room)
            able &= offloads(kind, zero, reshard)
            if not able.any():
                continue
            index = OFFLOADS.index(kind)
            there = holdings.of(group, inside[able], outside[able], index)
            good = (there.reserved <= holdings.near) & (there.trained <= room * NEAR)
            found.priced += len(good)
            found.moved += len(good)
            failed += int((~good).sum())
            if good.any():
                moved = inside[able][good], outside[able][good]
                kept.append(_reached(space, group, number, *moved, index, there.reserved[good]))
    reached = {name: np.concatenate([each[name] for each in kept]) for name in kept[0]}
    found.add(**reached)
    return reached, failed, float(held.reserved.min())


def _reached(
    space: Space, group: Group, number: int, inside: np.ndarray, outside: np.ndarray, offload: int, num_bytes: Array
) -> dict[str, np.ndarray]:
    """Layouts that fit, with their times."""
    size = len(inside)
    step = np.zeros(0)
    if size:
        points = points_of(space, group, inside, outside, offload)
        found = times(space.target, points, group.units.take(inside), weights(space.target, points))
        slower = [(space.rates.get(part, 1.0) - 1) * getattr(found, part) for part in PARTS] if space.rates else []
        step = sum(slower, found.step)
    return {
        "step": step, "bytes": num_bytes, "group": np.full(size, number, dtype=np.int32),
        "inside": inside.astype(np.int32), "outside": outside.astype(np.int32),
        "offload": np.full(size, offload, dtype=np.int8),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- results


def _order(points: Mapping[str, np.ndarray], by: By) -> np.ndarray:
    first, second = ("bytes", "step") if by is By.MEMORY else ("step", "bytes")
    return np.lexsort((points[second], points[first]))


def _front(points: Mapping[str, np.ndarray], order: np.ndarray, most: int = 12) -> np.ndarray:
    """Points, the fastest first in `order`, that no other beats in both; where there are many, spread evenly."""
    lowest = np.minimum.accumulate(points["bytes"][order])
    front = order[np.concatenate([[True], points["bytes"][order][1:] < lowest[:-1]])]
    if len(front) <= most:
        return np.asarray(front)
    return np.asarray(front[np.unique(np.linspace(0, len(front) - 1, most).astype(int))])


def _best_of(groups: list[Group], points: Mapping[str, np.ndarray]) -> dict[Mesh, tuple[float, float]]:
    order = np.argsort(points["step"], kind="stable")
    _, first = np.unique(points["group"][order], return_index=True)
    best: dict[Mesh, tuple[float, float]] = {}
    for index in order[np.sort(first)]:
        value = float(points["step"][index]), float(points["bytes"][index])
        best.setdefault(groups[points["group"][index]].mesh, value)
    return best


def _first_rows(shown: _Shown, order: np.ndarray, by: By, top: int) -> list[Row]:
    """The best layouts, `top` of them where as many are found among the first: closed forms may say that more fit."""
    size = top * _SPARE
    rows: list[Row] = []
    for start in range(0, min(len(order), _TRIES * size), size):
        for row in shown.rows(order[start : start + size], by):
            if len(rows) < top and row.price.fits_trained:
                rows.append(row)
        if len(rows) == top:
            break
    return rows


@dataclass(frozen=True)
class _Shown:
    """Points as runs that the rules accept, priced one by one, each once."""

    run: RunConfig
    space: Space
    groups: list[Group]
    points: Mapping[str, np.ndarray]
    _priced: dict[int, Row] = field(default_factory=dict)

    def rows(self, chosen: np.ndarray, by: By) -> list[Row]:
        """Those of the chosen that fit, best first."""
        rows = (row for row in map(self._row, map(int, chosen)) if row.price.fits)
        return by.ordered(rows)

    def _row(self, index: int) -> Row:
        if index not in self._priced:
            space, group = self.space, self.groups[self.points["group"][index]]
            place = (int(self.points[name][index]) for name in ("inside", "outside", "offload"))
            keys = keys_of(space, group, *place)
            plan = planned(with_keys(self.run, keys), space.target.arch, space.gpus, space.target.cluster)
            self._priced[index] = Row(keys, Price(plan, space.target.cluster))
        return self._priced[index]


def _overfull(
    space: Space, overfull: Mapping[Mesh, tuple[int, float]], fitting: Mapping[Mesh, object]
) -> list[Refusal]:
    """Meshes some layouts of which do not fit."""
    room, near = space.target.cluster.device.memory_bytes, np.array(list(fitting), dtype=np.float64)
    rows = []
    for mesh, (count, least) in overfull.items():
        if count:
            works = ("other options of this mesh fit",) if mesh in fitting else legal.nearest(mesh, near)
            rule = f"must fit in {bytes_text(room)}; the least of this mesh is {bytes_text(least)}"
            rows.append(Refusal(mesh, rule, count, works))
    return rows
