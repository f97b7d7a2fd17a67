"""What the context axis costs a block, over arrays: exposed seconds of its exchanges, and what it keeps.

ring        cp - 1 blocks of keys and values go round, twice as much backward, hidden behind the core of attention
ring, k     Ulysses inside groups of k neighbours, a ring of cp / k between them
allgather   keys and values of all, gathered before attention and kept; their gradients scattered after it
ulysses     all-to-alls: query, key, value before attention, its output after it; the same back. The literal program
            packs the three into one; where ranks are more than key/value heads, each head goes to all that need it
"""

from __future__ import annotations

import numpy as np

from meshwright.config.choices import Context
from meshwright.layout.axes import Axis
from meshwright.price.layouts import CONTEXTS, Array, Layouts
from meshwright.price.links import exchange_seconds, message_seconds, way
from meshwright.price.target import Target

_RING_STEP_S = 20e-6  # of a step of the ring that nothing hides: launches and waits


def context_seconds(target: Target, layouts: Layouts, tokens: Array) -> tuple[Array, Array]:
    """Exposed seconds of a block's forward and backward, for micro-batches of `tokens` tokens a rank."""
    out = _ring(target, layouts, tokens)
    for kind, seconds in ((Context.ALLGATHER, _gathered), (Context.ULYSSES, _exchanged)):
        here = layouts.context == CONTEXTS.index(kind)
        if here.any():
            other = seconds(target, layouts, tokens)
            out = np.where(here, other[0], out[0]), np.where(here, other[1], out[1])
    return np.asarray(np.where(layouts.cp > 1, out[0], 0.0)), np.asarray(np.where(layouts.cp > 1, out[1], 0.0))


def context_bytes(target: Target, layouts: Layouts, tokens: Array) -> Array:
    """What a block keeps of other ranks' keys and values for backward: all of them, where they were gathered."""
    gathered = layouts.context == CONTEXTS.index(Context.ALLGATHER)
    return np.asarray(gathered * (layouts.cp - 1) * _block(target, layouts, tokens))


def _block(target: Target, layouts: Layouts, tokens: Array, ways: Array | float = 1.0) -> Array:
    """Bytes of keys and values of a rank's own tokens, as they are exchanged over `ways` ranks that divide heads."""
    shapes = target.shapes
    heads = np.maximum(np.maximum(shapes.kv_heads / layouts.tp, 1.0), ways if target.is_literal else 1.0)
    return np.asarray(tokens * heads * (shapes.score_dim + shapes.value_dim) * target.stored)


def _ring(target: Target, layouts: Layouts, tokens: Array) -> tuple[Array, Array]:
    shapes, inner = target.shapes, layouts.inner_context
    ring = layouts.cp / inner
    hop = message_seconds(target, _block(target, layouts, tokens, inner), layouts.stride(Axis.CP) * inner)
    flops = 2 * tokens * shapes.heads / layouts.tp * (target.sequence / 2) * (shapes.score_dim + shapes.value_dim)
    core = flops / np.maximum(ring, 1) / (target.attention_peak * target.attention_share)
    again = 2.5 * core / target.values["attention.backward"]
    if target.is_literal:
        forward, backward = _hops(target, ring, hop, core, again)
    else:
        forward = (ring - 1) * np.maximum(hop - core, _RING_STEP_S)
        backward = (ring - 1) * np.maximum(2 * hop - again, 2 * _RING_STEP_S)
    if (inner == 1).all():
        return np.asarray(forward), np.asarray(backward)
    swapped = np.where(inner > 1, _all_to_alls(target, layouts, tokens, inner), 0.0)
    return np.asarray(forward + swapped), np.asarray(backward + swapped)


def _hops(target: Target, ring: Array, hop: Array, core: Array, again: Array) -> tuple[Array, Array]:
    """The literal program's: a block is under way while the one before it is worked on, in backward beside the
    gradients of the one before that; when the last is done, its gradients still go home.

        forward     own | kv 1            backward    own | kv 1 | kv 2            .
        hops        kv 1 | kv 2 ...       hops        kv 1 | kv 2 | d 1 | d 2 home
    """

    def shown(sent: Array, beside: Array) -> Array:
        slow = target.values["overlap.slow"] * np.minimum(sent, beside)
        return np.asarray(np.maximum(sent - beside, _RING_STEP_S) + slow)

    others = ring > 1
    forward = (ring - 1) * shown(hop, core)
    backward = others * (shown(hop, again) + hop) + np.maximum(ring - 2, 0) * shown(2 * hop, again)
    return np.asarray(forward), np.asarray(backward)


def _gathered(target: Target, layouts: Layouts, tokens: Array) -> tuple[Array, Array]:
    group = way(target, layouts.cp, layouts.stride(Axis.CP))
    seconds = group.gather(_block(target, layouts, tokens) * layouts.cp)
    return seconds, seconds


def _exchanged(target: Target, layouts: Layouts, tokens: Array) -> tuple[Array, Array]:
    seconds = _all_to_alls(target, layouts, tokens, layouts.cp)
    return seconds, seconds


def _all_to_alls(target: Target, layouts: Layouts, tokens: Array, ways: Array) -> Array:
    """Query and output, key and value, over groups of `ways` neighbours."""
    shapes = target.shapes
    group = way(target, ways, layouts.stride(Axis.CP))
    query = tokens * shapes.heads / layouts.tp * shapes.score_dim * target.stored
    if target.is_literal:
        packed = exchange_seconds(target, query + _block(target, layouts, tokens, ways), group, 1.0)
        return np.asarray(packed + exchange_seconds(target, query, group, 1.0))
    both = 2 * exchange_seconds(target, query, group, 1.0)
    return np.asarray(both + 2 * exchange_seconds(target, _block(target, layouts, tokens) / 2, group, 1.0))
