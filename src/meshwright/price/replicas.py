"""What replicas exchange, alone on their links, and the optimizer, over arrays of layouts.

    each unit and micro-batch   ZeRO-3 gathers parameters (forward and backward) and scatters gradients; ZeRO-2 of the
                                literal program scatters gradients
    once a step                 all-reduce (ZeRO-0), or scatter and gather (1, 2); all-reduce over copies (hybrid);
                                the gradient of a tied embedding between the outer stages; the norm

Expert tensors meet over dp x cp, all others over dp x ep x cp. What of it shows is `exposure.py`'s matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.layout.axes import Axis
from meshwright.price.layouts import Array, Layouts
from meshwright.price.links import Way, way
from meshwright.price.offload import fetch_seconds, visit_seconds
from meshwright.price.target import Target
from meshwright.price.weights import Weights, owned, shard, shards


@dataclass(frozen=True)
class Traffic:
    """Seconds of one unit's gather and scatter every micro-batch, and of its sum once a step."""

    fetch: Array
    scatter: Array
    sum: Array


@dataclass(frozen=True)
class Replicas:
    """By unit; `sums` and `gathers` once a step are those of the first, the fullest inner and the last stage."""

    block: Traffic
    embedding: Traffic
    head: Traffic
    again: Array  # a block's gather in backward
    once: Array  # how often a step's forward gathers, a micro-batch
    sums: tuple[Array, Array, Array]
    gathers: tuple[Array, Array, Array]
    closing: Array  # tied gradient, small sums, norm
    optimizer: Array

    @property
    def forward(self) -> Array:
        """Beside a block's forward."""
        return self.block.fetch * self.once

    @property
    def backward(self) -> Array:
        """Beside a block's backward."""
        return self.again + self.block.scatter


@dataclass(frozen=True)
class _Groups:
    """Ways of shards, copies and experts, and what each unit costs on them."""

    target: Target
    layouts: Layouts
    shard: Way
    copy: Way
    expert: Way
    within: Array
    small: Array

    def gather(self, dense: Array, routed: Array, width: int, calls: Array | float = 1.0) -> Array:
        """All-gather, or reduce-scatter, of elements in `calls` buckets (and as many small ones)."""
        seconds = self.shard.gather(dense * width) + self._further(calls) * self.shard.gather_latency
        if not self.target.shapes.active:
            return np.asarray(seconds)
        return np.asarray(seconds + np.where(routed > 0, self.expert.gather(routed * width), 0.0))

    def _further(self, calls: Array | float) -> Array | float:
        """Calls beside the first: of other buckets, and of small ones."""
        return calls - 1 + self.small * calls if self.target.is_literal else calls - 1

    def reduce(self, dense: Array, routed: Array, calls: Array | float = 1.0) -> Array:
        """The sum of gradients: all-reduce at ZeRO-0, else scatter, and all-reduce of the shards over copies."""
        width = self.target.precision.reduce.num_bytes
        whole = self.shard.all_reduce(dense * width) + self._further(calls) * self.shard.reduce_latency
        if self.target.shapes.active:
            whole = whole + np.where(routed > 0, self.expert.all_reduce(routed * width), 0.0)
        parts = self.gather(dense, routed, width, calls)
        if self.layouts.within.any():
            parts = parts + self.copy.all_reduce(dense * width / self.within)
        return np.asarray(np.where(self.layouts.zero == 0, whole, parts))


def replicas(target: Target, layouts: Layouts, held: Weights) -> Replicas:
    """What the replicas of every layout exchange."""
    groups = _groups(target, layouts)
    zero, stored, nothing = layouts.zero, target.stored, np.zeros_like(layouts.zero)
    scattered = (zero == 3) | ((zero == 2) & target.is_literal)

    def traffic(dense: Array, routed: Array) -> Traffic:
        reduced = groups.reduce(dense, routed)
        return Traffic(
            np.where(zero == 3, groups.gather(dense, routed, stored), 0.0)
            + fetch_seconds(target, layouts, shard(layouts, dense, routed)),
            np.where(scattered, reduced, 0.0),
            np.where(scattered, 0.0, reduced),
        )

    block = traffic(held.block_dense, held.block_routed)
    calls = [each + 1 if target.is_literal else 1.0 for each in (layouts.first, layouts.most - 1, layouts.last)]
    publish = (zero == 1) | (zero == 2)
    stages = list(zip(held.dense, held.routed, calls, strict=True))
    sums = [np.where(scattered, 0.0, groups.reduce(d, r, n)) for d, r, n in stages]
    gathers = [np.where(publish, groups.gather(d, r, stored, n), 0.0) for d, r, n in stages]
    return Replicas(
        block=block,
        embedding=traffic(held.embedding, nothing),
        head=traffic(held.head, nothing),
        again=np.where(layouts.reshard > 0, block.fetch, 0.0),
        once=np.where(layouts.reshard > 0, 1.0, 1 / layouts.accumulation),
        sums=(sums[0], sums[1], sums[2]),
        gathers=(gathers[0], gathers[1], gathers[2]),
        closing=_closing(target, layouts, held, groups),
        optimizer=_optimizer(target, layouts, held),
    )


def _groups(target: Target, layouts: Layouts) -> _Groups:
    dense = layouts.dp * layouts.ep * layouts.cp
    stride = _nearest(layouts, (Axis.DP, Axis.EP, Axis.CP))
    within = shards(layouts)
    return _Groups(
        target,
        layouts,
        shard=way(target, within, stride),
        copy=way(target, dense / within, stride * within),
        expert=way(target, layouts.dp * layouts.cp, _nearest(layouts, (Axis.DP, Axis.CP))),
        within=within,
        # Gains of norms are partial sums under sequence parallel: the literal program gives them their own buckets.
        small=np.where((layouts.tp > 1) & (layouts.sequence > 0) & target.is_literal, 1.0, 0.0),
    )


def _nearest(layouts: Layouts, axes: tuple[Axis, ...]) -> Array:
    """How far apart in rank the nearest members of a group over `axes` are; an axis of one rank joins nobody."""
    strides = [np.where(layouts.degree(axis) > 1, layouts.stride(axis), np.inf) for axis in axes]
    nearest = np.minimum.reduce(strides)
    return np.asarray(np.where(np.isfinite(nearest), nearest, 1.0))


def _closing(target: Target, layouts: Layouts, held: Weights, groups: _Groups) -> Array:
    """The tied embedding's gradient between the outer stages, small sums over tp, and one over the world."""
    world = way(target, layouts.ranks, np.ones_like(layouts.tp))
    # The norm, and counts and losses that the loss waits for.
    closing = world.all_reduce(32.0) + 2 * groups.shard.all_reduce(8.0)
    tensor = way(target, layouts.tp, layouts.stride(Axis.TP))
    closing = closing + groups.small * np.maximum(layouts.first, layouts.last) * tensor.all_reduce(0.0)
    if not target.arch.tie_embeddings:
        return closing
    pair = way(target, np.full_like(layouts.pp, 2.0), layouts.stride(Axis.PP) * np.maximum(layouts.pp - 1, 1))
    share = np.where((layouts.zero > 0) & target.is_literal, groups.within, 1.0)
    num_bytes = held.embedding / share * target.precision.reduce.num_bytes
    return np.asarray(closing + np.where(layouts.pp > 1, pair.all_reduce(num_bytes), 0.0))


def _optimizer(target: Target, layouts: Layouts, held: Weights) -> Array:
    """Updates: bytes of the own shard, and a pass over all gradients."""
    dense, routed = largest(held.dense), largest(held.routed)
    own = owned(layouts, dense, routed)
    updates = target.update_seconds(own, np.where(layouts.zero >= 2, own, dense + routed))
    return np.asarray(np.maximum(updates, visit_seconds(target, layouts, own)))


def largest(each: tuple[Array, Array, Array]) -> Array:
    """Of the three kinds of stages."""
    return np.asarray(np.maximum(np.maximum(each[0], each[1]), each[2]))
