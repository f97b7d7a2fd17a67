"""Which meshes a model can be cut on, by arithmetic alone, and which options each mesh has left. No prices.

    mesh      dp tp pp cp ep, their product is the number of devices
    options   within a unit (micro-batch, sequence parallel, kind of context exchange) x around it (ZeRO, schedule,
              recomputation); what decides nothing on a mesh, or is never better there, is not among them

Never better, so not enumerated: naive and gpipe (1f1b fills the same bubble with fewer micro-batches in flight), ZeRO-2
where gradients gather over several micro-batches in usual trainers (it is ZeRO-1 there).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import permutations
from typing import Any

import numpy as np

from meshwright.arch.arch import Arch
from meshwright.arch.unbuilt import lacking
from meshwright.config.choices import Context, Dtype, Offload, Recompute, Schedule
from meshwright.config.chunks import chunk_limits
from meshwright.layout.axes import DEFAULT_ORDER, Axis
from meshwright.plan.plan import ContextSplit
from meshwright.plan.resolve import unit_flops
from meshwright.plan.strategies import context, expert, tensor
from meshwright.price.cluster import Cluster, Following
from meshwright.price.layouts import CONTEXTS, CUT, RECOMPUTES, SCHEDULES, Array, held_blocks, outline
from meshwright.price.target import Target

AXES = ("dp", "tp", "pp", "cp", "ep")
_MOST_MICRO, _MOST_CHUNKS = 64, 12
_SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.ZB_H1, Schedule.ZB_V)
_INNER = 1, 2, 4, 8  # ranks of a group inside a ring

Mesh = tuple[int, int, int, int, int]
"""Degrees in the order of `AXES`."""


@dataclass(frozen=True)
class Space:
    """What is searched: `sequences` a step on `gpus` devices; `fixed` holds keys that the search may not change."""

    target: Target
    gpus: int
    sequences: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    split: bool = True  # whether schedules with a split backward run
    rates: Mapping[str, float] = field(default_factory=dict)  # measured over predicted seconds, by part; 1 where unsaid

    @cached_property
    def program(self) -> Target | None:
        """The same for the program of `meshwright train`, where other software is searched for and the model runs."""
        runs = not lacking(self.target.arch) and self.target.precision.compute is not Dtype.FLOAT8
        if self.target.is_literal or not runs:
            return None
        return self.target.literal

    def allowed(self, key: str, values: Sequence[Any]) -> list[Any]:
        """The values of `key` that may be chosen: those given, or the one it is fixed at."""
        return [self.fixed[key]] if key in self.fixed else list(values)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Layouts of one mesh that break one rule, and the nearest ones that do not."""

    mesh: Mesh
    rule: str
    count: int
    nearest: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"mesh": dict(zip(AXES, self.mesh, strict=True)), "rule": self.rule, "count": self.count,
                "nearest": list(self.nearest)}  # fmt: skip


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of `number`, ascending."""
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return tuple(sorted({*low, *(number // each for each in low)}))


def meshes(space: Space) -> Iterator[Mesh]:
    """Every way to write the number of devices as a product of the degrees; ep only for models with experts."""
    routed = space.target.arch.experts is not None
    for tp in divisors(space.gpus):
        for pp in divisors(space.gpus // tp):
            for cp in divisors(space.gpus // tp // pp):
                rest = space.gpus // tp // pp // cp
                for ep in divisors(rest) if routed else (1,):
                    mesh = rest // ep, tp, pp, cp, ep
                    if all(
                        space.fixed.get(f"mesh.{name}", size) == size for name, size in zip(AXES, mesh, strict=True)
                    ):
                        yield mesh


def mesh_rules(space: Space, mesh: Mesh) -> str | None:
    """The first rule of arithmetic that `mesh` breaks."""
    arch, (dp, tp, pp, cp, ep) = space.target.arch, mesh
    if (rule := next(tensor.degree_rules(arch, tp), None)) is not None:
        return f"tp {rule}"
    stages = space.fixed.get("parallel.stages")
    if stages and (len(stages) % pp or (len(stages) > 1 and not list(_schedules(space, pp)))):
        return f"pp x chunks must be the {len(stages)} stages of parallel.stages"
    if pp > arch.layers:
        return f"pp must be at most the {arch.layers} blocks"
    if not any(_schedules(space, pp)):
        return f"pp x parallel.chunks must be at most the {arch.layers} blocks, and chunks what the schedule takes"
    rule = context.length_rule(space.target.sequence, cp) or expert.degree_rule(arch, ep)
    if rule:
        return rule
    if space.sequences % (dp * ep):
        return f"dp x ep must divide the global batch of {space.sequences} sequences"
    if not micros(space, mesh):
        return "the global batch must be a multiple of micro x dp x ep"
    if {"parallel.offload", "parallel.zero_shard_within"} & set(space.fixed) and not any(
        _shardings(space, dp * ep * cp, dp * ep * cp)
    ):
        if space.fixed.get("parallel.offload") == Offload.PARAMS:
            return "parameters live elsewhere only at ZeRO-3, on several replicas"
        return f"parallel.zero_shard_within = {space.fixed['parallel.zero_shard_within']} must divide dp x ep x cp"
    return None


def micros(space: Space, mesh: Mesh) -> list[int]:
    """Sequences of a micro-batch: divisors of what a batch rank gets in a step, at most 64."""
    own = space.sequences // (mesh[0] * mesh[4])
    allowed = space.allowed("batch.micro", [each for each in divisors(own) if each <= _MOST_MICRO])
    return [each for each in allowed if own % each == 0]


Inside = tuple[int, int, int, int]
"""An option inside a unit: micro-batch, sequence parallel, kind of context exchange, ranks of a group inside a ring."""


def within(space: Space, mesh: Mesh) -> tuple[dict[str, Array], list[Refusal]]:
    """Options inside a unit, one element each (micro, sequence, context, inner_context), and refused ones by rule,
    with how many such options, and the legal ones of this mesh that differ least."""
    _, tp, _, cp, _ = mesh
    arch, length = space.target.arch, space.target.sequence
    rows: list[Inside] = []
    refused: dict[str, list[Inside]] = {}
    for micro in micros(space, mesh):
        for sequence in space.allowed("parallel.sequence", (True, False)) if tp > 1 else (False,):
            unchunked = tp > 1 and not sequence and space.fixed.get("parallel.asynchronous_tensor")
            for kind, inner in _contexts(space, cp):
                if unchunked:
                    rule: str | None = "parallel.asynchronous_tensor needs parallel.sequence"
                elif sequence and micro * (length // cp) % tp:
                    rule = "the tokens of a micro-batch must be a multiple of tp with parallel.sequence"
                else:
                    rule = context.split_rule(arch, length, tp, cp, ContextSplit(kind, inner))
                row = micro, int(sequence), CONTEXTS.index(kind), inner
                (rows if rule is None else refused.setdefault(rule, [])).append(row)
    table = np.array(rows, dtype=np.float64).reshape(-1, 4)
    columns = dict(zip(("micro", "sequence", "context", "inner_context"), table.T, strict=True))
    return columns, [Refusal(mesh, rule, len(some), _changed(some[0], rows)) for rule, some in refused.items()]


def _changed(bad: Inside, rows: list[Inside]) -> tuple[str, ...]:
    """Overrides that make a legal option of a refused one, the fewest; none where nothing inside a unit is legal."""
    if not rows:
        return ()
    good = min(rows, key=lambda row: sum(one != other for one, other in zip(row, bad, strict=True)))
    words = {
        "batch.micro": good[0], "parallel.sequence": str(bool(good[1])).lower(),
        "parallel.context": CONTEXTS[good[2]].value, "parallel.context_inner": good[3],
    }  # fmt: skip
    unlike = (one != other for one, other in zip(good, bad, strict=True))
    return (" ".join(f"{key}={word}" for (key, word), differs in zip(words.items(), unlike, strict=True) if differs),)


def _contexts(space: Space, cp: int) -> list[tuple[Context, int]]:
    if cp == 1:
        return [(Context.RING, 1)]
    kinds = [Context(each) for each in space.allowed("parallel.context", tuple(Context))]
    inners = space.allowed("parallel.context_inner", [each for each in _INNER if each < cp])
    ring = [(Context.RING, inner) for inner in inners if cp % inner == 0]
    whole = [(kind, 1) for kind in kinds if kind is not Context.RING and 1 in inners]  # only rings have groups inside
    return [*(ring if Context.RING in kinds else ()), *whole]


def around(space: Space, mesh: Mesh, near: int) -> tuple[dict[str, Array], list[tuple[int, ...]]]:
    """Options around units: columns, and the blocks of each virtual stage that the column `stages` points to.

    `near`: replicas of a tensor that share a node.
    """
    dp, _, pp, cp, ep = mesh
    recomputes = [RECOMPUTES.index(Recompute(each)) for each in space.allowed("parallel.recompute", tuple(Recompute))]
    rows: list[tuple[float, ...]] = []
    stages: list[tuple[int, ...]] = []
    for schedule, chunks in _schedules(space, pp):
        head = _head_blocks(space.target.arch, space.target.sequence)
        given = space.fixed.get("parallel.stages") if pp > 1 else None
        counts = tuple(given) if given else stage_counts(space.target.arch.layers, pp * chunks, head)
        stages.append(counts)
        cut = outline(held_blocks(counts, pp, schedule))
        for zero, shards, reshard in _shardings(space, dp * ep * cp, near):
            for recompute in recomputes:
                row = zero, shards, reshard, SCHEDULES.index(schedule), chunks, recompute, *cut, len(stages) - 1
                rows.append(tuple(float(each) for each in row))
    names = "zero", "within", "reshard", "schedule", "chunks", "recompute", *CUT, "stages"
    return dict(zip(names, np.array(rows).reshape(-1, len(names)).T, strict=True)), stages


def _schedules(space: Space, pp: int) -> Iterator[tuple[Schedule, int]]:
    given = space.fixed.get("parallel.stages")
    if pp == 1:
        if given is None or len(given) == 1:
            yield Schedule.ONE_F_ONE_B, 1
        return
    layers = space.target.arch.layers
    asked = "parallel.chunks" in space.fixed
    wanted = [each for each in _SCHEDULES if space.split or not each.is_split]
    for schedule in map(Schedule, space.allowed("parallel.schedule", wanted)):
        least, most = chunk_limits(schedule)
        for chunks in range(least, (most or max(_MOST_CHUNKS, space.fixed.get("parallel.chunks", 0))) + 1):
            # Chunks that do not divide make the fullest stage longer than one chunk fewer does.
            even = asked or chunks == least or any((layers + extra) % (pp * chunks) == 0 for extra in (0, 1, 2))
            if given is not None:
                legal = pp * chunks == len(given)
            else:
                spare = spare_stages(space.target.cluster, pp, layers) if asked else 0
                legal = pp * chunks <= layers + spare and even
            if legal and space.fixed.get("parallel.chunks", chunks) == chunks:
                yield schedule, chunks


def _shardings(space: Space, replicas: int, near: int) -> Iterator[tuple[int, int, int]]:
    """(stage, shard within, reshard after forward), as canonical plans have them: within one replica is no sharding,
    within all of them is 0."""
    alone = replicas == 1 or space.fixed.get("parallel.zero_shard_within") == 1
    for zero in space.allowed("parallel.zero", (0, 1, 2, 3)):
        if space.fixed.get("parallel.offload") == Offload.PARAMS and (zero < 3 or alone):
            continue  # only what each rank keeps its own piece of lives elsewhere
        if zero == 0 or alone:
            if zero == 0 or "parallel.zero" in space.fixed:
                yield 0, 0, 1
            continue
        groups = [0, *(size for size in (near, 8 * near) if 1 < size < replicas and replicas % size == 0)]
        for size in space.allowed("parallel.zero_shard_within", groups):
            if size and replicas % size:
                continue
            size = 0 if size == replicas else size
            for reshard in space.allowed("parallel.reshard_after_forward", (True, False)) if zero == 3 else (True,):
                yield zero, size, int(reshard)


@lru_cache(maxsize=256)
def _head_blocks(arch: Arch, sequence: int) -> float:
    """What the head costs, in blocks."""
    cost = unit_flops(arch, sequence)
    blocks = [cost(unit) for unit in range(1, arch.layers + 1)]
    return cost(arch.head_unit) * len(blocks) / sum(blocks)


def spare_stages(cluster: Cluster, pp: int, layers: int) -> int:
    """By how many virtual stages may outnumber blocks: usual trainers give the embedding and the head the place of a
    block each, where a pipeline stage has several chunks and so a block in another of them."""
    usual = cluster.software.following is Following.USUAL
    return 2 if usual and 1 < pp <= layers else 0


@lru_cache(maxsize=4096)
def stage_counts(blocks: int, parts: int, head: float) -> tuple[int, ...]:
    """Blocks of each virtual stage, at least one: the dearest as cheap as possible, early stages (which keep the most
    micro-batches) the emptier ones. `head`: what the last one holds besides, in blocks. Of one or two stages more than
    blocks the last, and then the first, hold nothing but their outer unit."""
    if 0 < parts - blocks <= 2 < parts:
        return (blocks + 2 - parts, *[1] * (parts - 2), 0)
    if parts > blocks:
        raise ValueError(f"{blocks} blocks cannot fill {parts} stages")
    whole = -(-blocks // parts)
    tries = sorted({size + extra for size in range(max(whole - 1, 1), blocks + 1) for extra in (0.0, head)})
    for most in tries:
        counts = [max(int(most), 1)] * (parts - 1) + [max(int(most - head + 1e-9), 1)]
        if sum(counts) >= blocks:
            break
    left = sum(counts) - blocks
    while left:
        for part in range(parts):
            if left and counts[part] > 1:
                counts[part] -= 1
                left -= 1
    return tuple(counts)


def legal_orders(space: Space, mesh: Mesh) -> list[tuple[tuple[Axis, ...], int]]:
    """Orders of the axes that put some axis on other links, the default first; with the replicas that share a node."""
    degree = dict(zip(AXES, mesh, strict=True))
    active = [axis for axis in DEFAULT_ORDER if degree[axis.value] > 1]
    node = space.target.cluster.node
    seen: dict[tuple[int, ...], tuple[tuple[Axis, ...], int]] = {}
    wanted = [tuple(map(Axis, each)) for each in space.allowed("mesh.order", (DEFAULT_ORDER,))]
    every = permutations(active) if "mesh.order" not in space.fixed else [
        tuple(axis for axis in wanted[0] if axis in active)
    ]  # fmt: skip
    for chosen in every:
        places = iter(chosen)
        order = tuple(next(places) if degree[axis.value] > 1 else axis for axis in DEFAULT_ORDER)
        stride, step = {}, 1
        for axis in reversed(order):
            stride[axis] = step
            step *= degree[axis.value]
        replicas = _nearest(stride, degree, (Axis.DP, Axis.EP, Axis.CP))
        near = node.neighbours(replicas, mesh[0] * mesh[3] * mesh[4])
        links = near, *_links(space, mesh, stride)
        seen.setdefault(links, (order, near))
    return list(seen.values())


def _links(space: Space, mesh: Mesh, stride: Mapping[Axis, int]) -> Iterator[int]:
    """All that a price reads of an order, besides the replicas that share a node: whatever differs here lies on other
    links, and nothing else does."""
    node, degree = space.target.cluster.node, dict(zip(AXES, mesh, strict=True))
    for axis in (Axis.TP, Axis.PP, Axis.CP, Axis.EP):
        yield node.neighbours(stride[axis], degree[axis.value])
    for inner in _INNER:  # a ring's hop to the neighbour, or over the groups inside it
        if inner < degree["cp"]:
            yield int(stride[Axis.CP] * inner < node.devices)
    if degree["pp"] > 1 and space.target.arch.tie_embeddings:  # the first stage and the last
        yield int(2 * stride[Axis.PP] * (degree["pp"] - 1) <= node.devices)
    if degree["pp"] > 1 and space.target.cluster.network.shared:
        yield min(stride[Axis.PP], node.devices)
    if space.target.arch.experts is not None:
        experts = _nearest(stride, degree, (Axis.DP, Axis.CP))
        yield node.neighbours(experts, degree["dp"] * degree["cp"])


def _nearest(stride: Mapping[Axis, int], degree: Mapping[str, int], axes: tuple[Axis, ...]) -> int:
    """How far apart in rank the nearest members of a group over `axes` are; an axis of one rank joins nobody."""
    return min((stride[axis] for axis in axes if degree[axis.value] > 1), default=1)


def nearest(mesh: Mesh, legal: np.ndarray) -> tuple[str, ...]:
    """The legal meshes that differ least from `mesh`, as overrides: at most two."""
    if not len(legal):
        return ()
    distance = np.abs(np.log2(legal) - np.log2(np.array(mesh))).sum(axis=1)
    best = np.argsort(distance, kind="stable")[:2]
    return tuple(words(tuple(int(size) for size in legal[index]), mesh) for index in best)


def words(mesh: Sequence[int], unlike: Sequence[int] = ()) -> str:
    """Overrides for the degrees that differ from `unlike`."""
    pairs = zip(AXES, mesh, unlike or [0] * len(AXES), strict=True)
    return " ".join(f"mesh.{name}={size}" for name, size, other in pairs if size != other)
