"""Parameters a rank holds, by pipeline stage and by who shares them, over arrays. Padding is not counted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwright.arch.arch import Arch
from meshwright.arch.parameters import unit_tensors
from meshwright.arch.tensors import LogicalAxis
from meshwright.price.layouts import Array, Layouts
from meshwright.price.target import Target

_CUT = {LogicalAxis.HEADS, LogicalAxis.FFN, LogicalAxis.EXPERT_FFN, LogicalAxis.VOCABULARY}


@dataclass(frozen=True, slots=True)
class Numbers:
    """Elements of a mean block or an outer unit: cut over tp, as key/value heads, whole, of experts (over tp, ep)."""

    cut: float
    kv: float
    whole: float
    experts: float

    def dense(self, layouts: Layouts, kv_heads: int) -> Array:
        """Elements a rank holds that all its replicas share."""
        tp = layouts.tp
        return np.asarray(self.cut / tp + self.kv / np.minimum(tp, kv_heads) + self.whole)

    def routed(self, layouts: Layouts) -> Array:
        """Elements of its experts."""
        return np.asarray(self.experts / (layouts.tp * layouts.ep))


@lru_cache(maxsize=128)
def numbers(arch: Arch) -> tuple[Numbers, Numbers, Numbers]:
    """Embedding, mean block, head; a tied head counts as its own (`Weights` removes it where both are on one rank)."""
    block = [_count(arch, unit) for unit in range(1, arch.layers + 1)]
    mean = Numbers(*(sum(getattr(each, name) for each in block) / arch.layers for name in Numbers.__slots__))
    head = _count(arch, arch.head_unit)
    if arch.tie_embeddings:
        head = Numbers(head.cut + arch.vocab * arch.hidden, head.kv, head.whole, head.experts)
    return _count(arch, 0), mean, head


def _count(arch: Arch, unit: int) -> Numbers:
    cut = kv = whole = experts = 0
    for tensor in unit_tensors(arch, unit):
        axes = set(tensor.axes)
        if LogicalAxis.EXPERTS in axes:
            experts += tensor.numel
        elif axes & _CUT:
            cut += tensor.numel
        elif LogicalAxis.KV_HEADS in axes:
            kv += tensor.numel
        else:
            whole += tensor.numel
    return Numbers(cut, kv, whole, experts)


@dataclass(frozen=True)
class Weights:
    """Elements on the first, the fullest inner and the last stage, of one block and of the outer units."""

    block_dense: Array
    block_routed: Array
    embedding: Array
    head: Array
    dense: tuple[Array, Array, Array]
    routed: tuple[Array, Array, Array]


def weights(target: Target, layouts: Layouts) -> Weights:
    """What a rank of each layout holds."""
    arch = target.arch
    embedding, block, head = numbers(arch)
    both = layouts.head_first
    dense, routed = block.dense(layouts, arch.kv_heads), block.routed(layouts)
    first, last = embedding.dense(layouts, arch.kv_heads), head.dense(layouts, arch.kv_heads)
    table = arch.vocab * arch.hidden / layouts.tp
    # Further tokens predicted live where the head does.
    further_first, further_last = target.predicted * both, target.predicted * ~both
    outer_first = first + np.where(both, last - (table if arch.tie_embeddings else 0.0), 0.0)
    first_blocks, last_blocks = layouts.first + further_first, layouts.last + further_last
    return Weights(
        dense,
        routed,
        first,
        last,
        (first_blocks * dense + outer_first, layouts.most * dense, last_blocks * dense + ~both * last),
        (first_blocks * routed, layouts.most * routed, last_blocks * routed),
    )


def shards(layouts: Layouts) -> Array:
    """Ranks that share out what all replicas hold; experts are shared out over all of theirs, dp x cp."""
    return np.where(layouts.within > 0, layouts.within, layouts.dp * layouts.ep * layouts.cp)


def shard(layouts: Layouts, dense: Array, routed: Array) -> Array:
    """Elements of a rank's shard."""
    return np.asarray(dense / shards(layouts) + routed / (layouts.dp * layouts.cp))


def owned(layouts: Layouts, dense: Array, routed: Array) -> Array:
    """Elements that a rank updates: its shard from ZeRO-1 on."""
    return np.where(layouts.zero > 0, shard(layouts, dense, routed), dense + routed)
