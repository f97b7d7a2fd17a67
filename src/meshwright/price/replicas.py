"""What replicas exchange, and the optimizer, over arrays of layouts.

    each unit and micro-batch   ZeRO-3 gathers parameters (forward and backward) and scatters gradients; ZeRO-2 of the
                                literal program scatters gradients
    once a step                 all-reduce (ZeRO-0), or scatter and gather (1, 2); all-reduce over copies (hybrid);
                                the gradient of a tied embedding between the outer stages; the norm

Expert tensors meet over dp x cp, all others over dp x ep x cp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.layout.axes import Axis
from meshwright.price.cluster import Following
from meshwright.price.layouts import Array, Layouts
from meshwright.price.links import Way, way
from meshwright.price.schedule import Stages
from meshwright.price.target import Target
from meshwright.price.weights import Weights


@dataclass(frozen=True)
class Replicas:
    """`forward`, `backward`: seconds beside a block's own, alone on the links. `sums`, `gathers`: once a step, on the
    first, the fullest inner and the last stage; `edge`: the part of a sum that starts after the last backward."""

    forward: Array
    backward: Array
    sums: tuple[Array, Array, Array]
    gathers: tuple[Array, Array, Array]
    edge: Array
    block_sum: Array  # of one block, once a step
    closing: Array  # tied gradient and norm
    optimizer: Array

    def step(self, target: Target, layouts: Layouts, stages: Stages) -> Array:
        """Exposed seconds once a step."""
        if target.legacy:
            sums, gathers = _largest(self.sums), _largest(self.gathers)
            return np.asarray(sums + gathers + self.closing)
        literal = target.cluster.software.following is Following.LITERAL
        exposed = np.zeros_like(self.edge)
        slack = np.zeros_like(self.edge)
        for sums, gathers, own in zip(self.sums, self.gathers, (stages.first, stages.inner, stages.last), strict=True):
            chunk = 1 / layouts.chunks
            if literal:
                under = np.minimum(sums, own[1] * chunk)
                late = np.maximum(sums - own[1] * chunk, np.where(sums > 0, self.edge, 0.0))
                left = late + target.values["overlap.slow"] * under + gathers
            else:
                share = target.values["overlap.reduce"]
                left = (
                    sums - share * np.minimum(sums, 0.8 * own[1]) + gathers - share * np.minimum(gathers, own[0] * 0.8)
                )
            exposed = np.maximum(exposed, left - slack)
            slack = slack + np.where(layouts.pp > 1, own[1] * chunk, 0.0)
        return np.asarray(exposed + self.closing)


def replicas(target: Target, layouts: Layouts, held: Weights) -> Replicas:
    """What the replicas of every layout exchange."""
    stored, reduced = target.stored, target.precision.reduce.num_bytes
    dense = layouts.dp * layouts.ep * layouts.cp
    stride = np.minimum(layouts.stride(Axis.DP), np.minimum(layouts.stride(Axis.EP), layouts.stride(Axis.CP)))
    within = np.where(layouts.within > 0, layouts.within, dense)
    shard, copy = way(target, within, stride), way(target, dense / within, stride * within)
    expert = way(target, layouts.dp * layouts.cp, np.minimum(layouts.stride(Axis.DP), layouts.stride(Axis.CP)))
    stage, literal = layouts.zero, target.cluster.software.following is Following.LITERAL

    def gather(dense_numel: Array, routed_numel: Array, width: int) -> Array:
        return shard.gather(dense_numel * width) + np.where(routed_numel > 0, expert.gather(routed_numel * width), 0.0)

    def reduce(dense_numel: Array, routed_numel: Array) -> Array:
        whole = shard.all_reduce(dense_numel * reduced) + np.where(
            routed_numel > 0, expert.all_reduce(routed_numel * reduced), 0.0
        )
        parts = gather(dense_numel, routed_numel, reduced) + copy.all_reduce(dense_numel * reduced / within)
        return np.asarray(np.where(stage == 0, whole, parts))

    fetch = np.where(stage == 3, gather(held.block_dense, held.block_routed, stored), 0.0)
    scatter = np.where((stage == 3) | ((stage == 2) & literal), reduce(held.block_dense, held.block_routed), 0.0)
    once = np.where(layouts.reshard > 0, 1.0, 1 / layouts.accumulation)
    again = np.where(layouts.reshard > 0, fetch, 0.0)
    per_step = (stage < 2) | ((stage == 2) & (not literal))
    sums = tuple(np.where(per_step, reduce(d, r), 0.0) for d, r in zip(held.dense, held.routed, strict=True))
    publish = (stage == 1) | (stage == 2)
    gathers = tuple(np.where(publish, gather(d, r, stored), 0.0) for d, r in zip(held.dense, held.routed, strict=True))
    edge = np.where(per_step, reduce(held.embedding, np.zeros_like(held.embedding)), 0.0)
    return Replicas(
        forward=fetch * once,
        backward=again + scatter,
        sums=(sums[0], sums[1], sums[2]),
        gathers=(gathers[0], gathers[1], gathers[2]),
        edge=edge,
        block_sum=np.where(per_step, reduce(held.block_dense, held.block_routed), 0.0),
        closing=_closing(target, layouts, held, within),
        optimizer=_optimizer(target, layouts, held, within),
    )


def _closing(target: Target, layouts: Layouts, held: Weights, within: Array) -> Array:
    """The tied embedding's gradient between the outer stages, and one small sum over the world."""
    world: Way = way(target, layouts.ranks, np.ones_like(layouts.tp))
    norm = world.all_reduce(40.0)
    if not target.arch.tie_embeddings:
        return norm
    pair = way(target, np.full_like(layouts.pp, 2.0), layouts.stride(Axis.PP) * np.maximum(layouts.pp - 1, 1))
    literal = target.cluster.software.following is Following.LITERAL
    share = np.where((layouts.zero > 0) & literal, within, 1.0)
    num_bytes = held.embedding / share * target.precision.reduce.num_bytes
    return np.asarray(norm + np.where(layouts.pp > 1, pair.all_reduce(num_bytes), 0.0))


def _optimizer(target: Target, layouts: Layouts, held: Weights, within: Array) -> Array:
    """Updates: bytes of the own shard, and a pass over all gradients."""
    per_element = target.values["optimizer.bytes"] if target.adam else 16.0
    dense, routed = _largest(held.dense), _largest(held.routed)
    ways = np.where(layouts.zero > 0, within, 1.0)
    routed_ways = np.where(layouts.zero > 0, layouts.dp * layouts.cp, 1.0)
    owned = dense / ways + routed / routed_ways
    whole = np.where(layouts.zero >= 2, owned, dense + routed)
    return np.asarray((owned * (per_element - 6) + whole * 6) / target.memory_rate)


def _largest(each: tuple[Array, Array, Array]) -> Array:
    return np.asarray(np.maximum(np.maximum(each[0], each[1]), each[2]))
