"""What a unit exchanges while it runs, over arrays: exposed seconds of the tensor, context and expert axes.

tensor    2 all-reduces of the stream a pass, or 2 gathers and 2 scatters (sequence parallel; backward gathers the
          inputs of column products once more where the stack kept only their parts); in chunks under the products by
          `ring.py`
context   keys and values, by `context.py`
expert    2 all-to-alls a pass: tokens to their experts and back (the literal program sends their number ahead)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.layout.axes import Axis
from meshwright.price.cluster import Attention
from meshwright.price.context import context_seconds
from meshwright.price.layouts import Array, Layouts
from meshwright.price.links import exchange_seconds, way
from meshwright.price.ring import ring_seconds
from meshwright.price.target import Target


@dataclass(frozen=True)
class Exchanges:
    """Exposed seconds of a block's forward and backward, and of the outer units' both."""

    tp_forward: Array
    tp_backward: Array
    cp_forward: Array
    cp_backward: Array
    ep_forward: Array
    ep_backward: Array
    tp_outer: Array  # half an all-reduce pair of the stream: embedding forward, head backward
    tp_head: Array  # the head's forward: its inputs, and what a token's loss needs of all parts of the vocabulary

    def take(self, index: np.ndarray) -> Exchanges:
        return Exchanges(**{name: getattr(self, name)[index] for name in self.__dataclass_fields__})


def exchanges(target: Target, layouts: Layouts, tokens: Array, beside: Array) -> Exchanges:
    """Of each layout, for micro-batches of `tokens` tokens a rank; `beside`: seconds of the weight products of a
    block's column products."""
    forward, backward, outer = _tensor(target, layouts, tokens, beside)
    ring = context_seconds(target, layouts, tokens)
    experts = _experts(target, layouts, tokens)
    return Exchanges(forward, backward, *ring, *experts, outer, _head(target, layouts, tokens))


def _tensor(target: Target, layouts: Layouts, tokens: Array, beside: Array) -> tuple[Array, Array, Array]:
    """The literal program keeps the whole inputs of column products, and sums their gradients while it computes those
    of their weights: of four collectives backward two run beside `beside`, and none gathers again."""
    group = way(target, layouts.tp, layouts.stride(Axis.TP))
    stream = tokens * target.shapes.hidden * target.stored
    pair = np.where(layouts.sequence > 0, 2 * group.gather(stream), group.all_reduce(stream))
    if target.is_literal:
        sums = np.where(layouts.sequence > 0, 2 * group.gather(stream), 2 * group.all_reduce(stream))
        late = np.maximum(sums - beside, 0.0) + target.values["overlap.slow"] * np.minimum(sums, beside)
        forward, backward = 2 * pair, 2 * pair - sums + late
        if layouts.asynchronous.any():
            ring = ring_seconds(target, layouts, tokens)
            forward = np.where(layouts.asynchronous > 0, ring[0], forward)
            backward = np.where(layouts.asynchronous > 0, ring[1], backward)
        return forward, backward, pair
    again = np.where(layouts.sequence > 0, group.gather(stream), 0.0)
    chunked = np.logical_or(layouts.asynchronous > 0, _user_buffers(target, layouts) > 0)
    shown = np.where(chunked, 1 - target.values["overlap.tensor"], 1.0)
    return 2 * pair * shown, (2 * pair + again) * shown, pair


def _head(target: Target, layouts: Layouts, tokens: Array) -> Array:
    """Gathers of the literal program: the stream under sequence parallel, and three float64 a token for the loss."""
    if not target.is_literal:
        return np.zeros_like(tokens)
    group = way(target, layouts.tp, layouts.stride(Axis.TP))
    inputs = group.gather(tokens * target.shapes.hidden * target.stored)
    loss = group.gather(24 * tokens * layouts.tp)
    return np.asarray(np.where(layouts.tp > 1, np.where(layouts.sequence > 0, inputs, 0.0) + loss, 0.0))


def _user_buffers(target: Target, layouts: Layouts) -> Array:
    """Stacks of the newest fused kernels overlap tensor collectives by themselves under sequence parallel."""
    newest = target.cluster.software.attention is Attention.FLASH3 and not target.eager and not target.legacy
    return np.asarray(newest * (layouts.sequence > 0), dtype=np.float64)


def _experts(target: Target, layouts: Layouts, tokens: Array) -> tuple[Array, Array]:
    """Forward and backward. The literal program sends a row for every choice, from each tensor rank the columns that it
    will need there, and how many there are ahead of them; it hides nothing of it."""
    shapes = target.shapes
    if not shapes.active:
        return np.zeros_like(tokens), np.zeros_like(tokens)
    share = sum(block.count for block in shapes.blocks if block.routed) / shapes.layers
    group = way(target, layouts.ep, layouts.stride(Axis.EP))
    rows = tokens * shapes.active * shapes.hidden * target.stored
    if target.is_literal:
        counts = exchange_seconds(target, 8.0 * shapes.experts, group, 1.0)
        backward = 2 * share * exchange_seconds(target, rows, group, 1.0)
        return np.asarray(backward + share * counts), np.asarray(backward)
    stream = np.where(layouts.sequence > 0, layouts.tp, 1.0)
    once = exchange_seconds(target, rows / stream, group, shapes.active)
    hidden = target.values["overlap.experts.graphs" if target.captured else "overlap.experts"]
    shown = np.asarray(2 * share * once * (1 - hidden))
    return shown, shown
