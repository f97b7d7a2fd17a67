"""Groups of legal layouts, ready to be priced: one mesh in one order, `inside` x `outside`.

inside     micro-batch, sequence parallel, kind of context exchange: what a unit costs is priced here, once
outside    ZeRO, schedule, chunks, recomputation
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.config.choices import Offload, Schedule
from meshwright.layout.axes import Axis
from meshwright.price import legal
from meshwright.price.compute import Units, units
from meshwright.price.layouts import CONTEXTS, OFFLOADS, RECOMPUTES, SCHEDULES, Array, Layouts
from meshwright.price.legal import AXES, Mesh, Refusal, Space
from meshwright.price.memory import memories
from meshwright.price.weights import weights


@dataclass(frozen=True)
class Group:
    """Layouts of one mesh in one order: `inside` x `outside`, and what no time of theirs can be below."""

    mesh: Mesh
    order: tuple[Axis, ...]
    inside: Mapping[str, Array]
    outside: Mapping[str, Array]
    stages: list[tuple[int, ...]]
    units: Units
    bound: Array  # one element an `inside`


def groups_of(space: Space) -> tuple[list[Group], list[Refusal], int]:
    """Groups of legal layouts, refusals of meshes and options, and how many layouts were looked at."""
    rules = {mesh: legal.mesh_rules(space, mesh) for mesh in legal.meshes(space)}
    around: _Around = {}
    open_ones = [_options(space, mesh, around) for mesh, rule in rules.items() if rule is None]
    legal_meshes = np.array([each.mesh for each in open_ones if each.count], dtype=np.float64).reshape(-1, len(AXES))
    # A mesh that breaks a rule of arithmetic counts for as many layouts as any has.
    most = max((each.most for each in open_ones), default=1)
    refused = [refusal for each in open_ones if each.count for refusal in each.refused]
    for refusal in (refusal for each in open_ones if not each.count for refusal in each.refused):
        refused.append(replace(refusal, nearest=legal.nearest(refusal.mesh, legal_meshes)))
    for mesh, rule in rules.items():
        if rule is not None:
            refused.append(Refusal(mesh, rule, most, legal.nearest(mesh, legal_meshes)))
    drafts = [draft for each in open_ones for draft in each.drafts]
    enumerated = sum(each.count for each in open_ones) + sum(each.count for each in refused)
    return list(priced_units(space, drafts)), refused, enumerated


@dataclass(frozen=True)
class _Options:
    """What one mesh has: `count` layouts over all orders, at most `most` in one, and refused ones by rule."""

    mesh: Mesh
    drafts: list[_Draft]
    count: int
    most: int
    refused: list[Refusal]


def _options(space: Space, mesh: Mesh, around: _Around) -> _Options:
    """`around` keeps the options around units of meshes that share them."""
    inside, rules = legal.within(space, mesh)
    drafts: list[_Draft] = []
    refused: dict[str, Refusal] = {}
    total, most = 0, 1
    for order, replicas in legal.legal_orders(space, mesh):
        key = mesh[2], mesh[0] * mesh[3] * mesh[4], replicas
        if key not in around:
            around[key] = legal.around(space, mesh, replicas)
        outside, stages = around[key]
        count, untried = tried(space, mesh, inside, outside)
        total, most = total + count, max(most, count)
        for more in (*(replace(rule, count=rule.count * len(outside["zero"])) for rule in rules), *untried):
            known_ones = refused.get(more.rule)
            refused[more.rule] = replace(more, count=more.count + (known_ones.count if known_ones else 0))
        if count:
            drafts.append((mesh, order, inside, outside, stages))
    return _Options(mesh, drafts, total, most, [each for each in refused.values() if each.count])


def tried(
    space: Space, mesh: Mesh, inside: Mapping[str, Array], outside: Mapping[str, Array]
) -> tuple[int, list[Refusal]]:
    """How many of inside x outside are `known`, and those that are not by rule; ZeRO-2 that is ZeRO-1 is none."""
    micro, pp = inside["micro"], mesh[2]
    m = space.sequences / (micro * mesh[0] * mesh[4])
    schedule, other = outside["schedule"], ~_same_as_one(space, outside)
    rest = int((m > 1).sum()) * int(other.sum()) + int((m <= 1).sum()) * len(other)
    refused = []
    for kind, misses, rule in _unknown_to_closed_forms(m, pp):
        chosen = schedule == SCHEDULES.index(kind)
        count = int((misses & (m > 1)).sum()) * int((chosen & other).sum())
        count += int((misses & (m <= 1)).sum()) * int(chosen.sum())
        if count:
            works = [f"batch.micro={int(each)}" for each in micro[~misses][:1]]
            if "parallel.schedule" not in space.fixed:
                works.append("parallel.schedule=1f1b parallel.chunks=1")
            refused.append(Refusal(mesh, rule, count, tuple(works)))
    return rest - sum(each.count for each in refused), refused


def _unknown_to_closed_forms(m: Array, pp: int) -> Iterator[tuple[Schedule, npt.NDArray[np.bool_], str]]:
    """Schedules whose closed form is not about every number of micro-batches `m`: where it is not, and the rule."""
    yield Schedule.INTERLEAVED, m % pp != 0, "interleaved is searched where pp divides the micro-batches of a step"
    yield Schedule.ZB_V, m < 2 * pp - 1, "zb-v is searched from 2 pp - 1 micro-batches a step on"


def _same_as_one(space: Space, outside: Mapping[str, Array]) -> npt.NDArray[np.bool_]:
    """Whether an option is ZeRO-2 that usual trainers run as ZeRO-1 as soon as there are several micro-batches."""
    searched = not space.target.is_literal and "parallel.zero" not in space.fixed
    return np.asarray((outside["zero"] == 2) & searched)


def has_legal(space: Space) -> bool:
    """Whether any layout is legal; no prices."""
    return first_legal(space) is not None


def first_legal(space: Space) -> Mesh | None:
    """The first mesh with a legal layout, if there is one; no prices."""
    for mesh in legal.meshes(space):
        if legal.mesh_rules(space, mesh) is None:
            inside, _ = legal.within(space, mesh)
            if len(inside["micro"]) and tried(space, mesh, inside, legal.around(space, mesh, 1)[0])[0]:
                return mesh
    return None


_Draft = tuple[Mesh, tuple[Axis, ...], dict[str, Array], dict[str, Array], list[tuple[int, ...]]]
_Around = dict[tuple[int, int, int], tuple[dict[str, Array], list[tuple[int, ...]]]]


def priced_units(space: Space, drafts: list[_Draft]) -> Iterator[Group]:
    """What units cost, for all groups of one order at once."""
    by_order: dict[tuple[Axis, ...], list[_Draft]] = {}
    for draft in drafts:
        by_order.setdefault(draft[1], []).append(draft)
    for order, some in by_order.items():
        parts = [_inside_layouts(space, mesh, order, inside) for mesh, _, inside, _, _ in some]
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
        together = Layouts(**joined, order=order)
        priced = units(space.target, together)
        bounds = _bound(space, together, priced)
        start = 0
        for mesh, _, inside, outside, stages in some:
            own = np.arange(start, start + len(inside["micro"]))
            yield Group(mesh, order, inside, outside, stages, priced.take(own), bounds[own])
            start += len(own)


_COLUMNS = tuple(name for name in Layouts.__dataclass_fields__ if name != "order")


def _inside_layouts(space: Space, mesh: Mesh, order: tuple[Axis, ...], inside: Mapping[str, Array]) -> Layouts:
    size = len(inside["micro"])
    given = _common(space, mesh, size) | dict(inside)
    rest = {name: np.zeros(size) for name in _COLUMNS if name not in given}
    return Layouts(**given, **rest, order=order)


def _common(space: Space, mesh: Mesh, size: int) -> dict[str, Array]:
    """Columns that all layouts of a mesh share."""
    chunked = float(bool(space.fixed["parallel.asynchronous_tensor"]) and mesh[1] > 1)
    values = dict(zip(AXES, map(float, mesh), strict=True)) | {
        "sequences": float(space.sequences),
        "asynchronous": chunked,
    }
    return {name: np.full(size, value) for name, value in values.items()}


def _bound(space: Space, layouts: Layouts, priced: Units) -> Array:
    """Seconds that no schedule, sharding or recomputation goes below: the mean stage's blocks, and nothing else."""
    each = priced.exchanged
    block = priced.forward + priced.backward + each.tp_forward + each.tp_backward
    block = block + each.cp_forward + each.cp_backward + each.ep_forward + each.ep_backward
    blocks = space.target.arch.layers / layouts.pp
    return np.asarray(layouts.accumulation * blocks * np.maximum(block, priced.host))


def known(space: Space, group: Group, worth: np.ndarray) -> npt.NDArray[np.bool_]:
    """inside x outside: whether a schedule has the micro-batches that its closed form is about, and ZeRO-2 is not 1."""
    dp, _, pp, _, ep = group.mesh
    m = space.sequences / (group.inside["micro"][worth] * dp * ep)
    known = ~((m > 1)[:, None] & _same_as_one(space, group.outside))
    for kind, misses, _ in _unknown_to_closed_forms(m, pp):
        known &= ~(misses[:, None] & (group.outside["schedule"] == SCHEDULES.index(kind)))
    return np.asarray(known)


def points_of(space: Space, group: Group, inside: np.ndarray, outside: np.ndarray, offload: int) -> Layouts:
    pp, layers = group.mesh[2], space.target.arch.layers
    given = _common(space, group.mesh, len(inside))
    given |= {name: column[inside] for name, column in group.inside.items()}
    given |= {name: column[outside] for name, column in group.outside.items() if name != "stages"}
    given["inner"] = layers - given["first"] - given["last"] if pp > 1 else np.zeros(len(inside))
    return Layouts(**given, offload=np.full(len(inside), float(offload)), order=group.order)


def trained_bytes(space: Space, points: Layouts, asked: npt.NDArray[np.bool_]) -> Array:
    """What `meshwright train` reserves for those `asked` for, in closed form; 0 where it does not run a layout."""
    found = np.zeros(len(points))
    if space.program is not None:
        some = np.flatnonzero(asked)
        mine = points.part(some)
        if len(mine):
            found[some] = memories(space.program, mine, weights(space.program, mine)).reserved
    return found


def least_bytes(space: Space, group: Group, elsewhere: tuple[Offload, ...] = (Offload.NONE,)) -> float:
    """Bytes of the most frugal layouts of a group: all sharding and recomputation on offer, and what of `elsewhere`."""
    outside = group.outside
    frugal = (outside["zero"] == outside["zero"].max()) & (outside["recompute"] == outside["recompute"].max())
    chosen = np.flatnonzero(frugal)
    inside, outer = np.repeat(np.arange(len(group.bound)), len(chosen)), np.tile(chosen, len(group.bound))
    found, given = [], "parallel.offload" in space.fixed  # then every layout has it
    for kind in map(Offload, space.allowed("parallel.offload", elsewhere)):
        able = np.flatnonzero(given | offloads(kind, outside["zero"][outer], outside["reshard"][outer]))
        points = points_of(space, group, inside[able], outer[able], OFFLOADS.index(kind))
        if len(points):
            found.append(memories(space.target, points, weights(space.target, points)).reserved.min())
    return float(min(found))


def offloads(kind: Offload, zero: Array, reshard: Array) -> npt.NDArray[np.bool_]:
    """Whether layouts can have that much elsewhere: parameters where they are sharded between their uses."""
    return np.asarray((kind is not Offload.PARAMS) | ((zero == 3) & (reshard > 0)))


def keys_of(space: Space, group: Group, inside: int, outside: int, offload: int) -> dict[str, Any]:
    """The run's keys that make one layout."""
    one = {name: column[inside] for name, column in group.inside.items()}
    one |= {name: column[outside] for name, column in group.outside.items()}
    pp = group.mesh[2]
    keys: dict[str, Any] = dict(zip((f"mesh.{name}" for name in AXES), group.mesh, strict=True))
    keys["mesh.order"] = [axis.value for axis in group.order]
    keys["parallel.zero"] = int(one["zero"])
    keys["parallel.zero_shard_within"] = int(one["within"])
    keys["parallel.reshard_after_forward"] = bool(one["reshard"])
    keys["parallel.sequence"] = bool(one["sequence"])
    keys["parallel.schedule"] = SCHEDULES[int(one["schedule"])].value
    keys["parallel.chunks"] = int(one["chunks"])
    stages = list(group.stages[int(one["stages"])])
    keys["parallel.stages"] = stages if pp > 1 and min(stages) > 0 else "balanced"
    keys["parallel.context"] = CONTEXTS[int(one["context"])].value
    keys["parallel.context_inner"] = int(one["inner_context"])
    keys["parallel.recompute"] = RECOMPUTES[int(one["recompute"])].value
    keys["parallel.offload"] = OFFLOADS[offload].value
    keys["batch.global"] = space.sequences
    keys["batch.micro"] = int(one["micro"])
    return keys
