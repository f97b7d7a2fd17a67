"""Seconds of one unit on one micro-batch, over arrays: products, attention, elementwise traffic, and what the axes
inside a unit exchange. Each distinct (tp, cp, ep, micro-batch, sequence parallel) is priced once.

A block is the mean block of the model: dense and routed, sliding and full ones by their number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.layout.axes import Axis
from meshwright.price.exchanges import Exchanges, exchanges
from meshwright.price.layouts import Array, Layouts
from meshwright.price.products import product_seconds, product_times
from meshwright.price.shapes import BlockShape, Side
from meshwright.price.sharing import interleaved_exchanges
from meshwright.price.target import Target


@dataclass(frozen=True)
class Units:
    """Seconds on one rank and one micro-batch: computation alone, then what the axes add (exposed)."""

    forward: Array
    backward: Array
    core: Array  # what selective recomputation repeats
    host: Array  # launches of a block, forward and backward
    embedding_forward: Array
    embedding_backward: Array
    head_forward: Array
    head_backward: Array
    exchanged: Exchanges

    def take(self, index: np.ndarray) -> Units:
        """The units of layouts that share them."""
        own = {name: getattr(self, name)[index] for name in _ARRAYS}
        return Units(**own, exchanged=self.exchanged.take(index))

    def slowed(self, factor: Array) -> Units:
        """The same on nodes that all wait for the slowest: launches and exchanges take no longer."""
        own = {name: getattr(self, name) * (1.0 if name == "host" else factor) for name in _ARRAYS}
        return Units(**own, exchanged=self.exchanged)


_INSIDE = (Axis.TP, Axis.CP, Axis.EP)
_ARRAYS = (
    "forward", "backward", "core", "host", "embedding_forward", "embedding_backward", "head_forward", "head_backward",
)  # fmt: skip


def distinct(layouts: Layouts) -> tuple[Layouts, npt.NDArray[np.intp]]:
    """Layouts whose units differ, and which of them each layout has."""
    columns = [layouts.tp, layouts.cp, layouts.ep, layouts.micro, layouts.sequence, layouts.asynchronous]
    inside = layouts.order[min(map(layouts.order.index, _INSIDE)) :]
    if set(inside) - set(_INSIDE):  # else strides follow from the degrees
        columns += [layouts.stride(axis) for axis in _INSIDE]
    key = np.zeros(len(layouts))
    for column in columns:
        most = float(column.max()) + 1
        if key.max() * most + most >= 2**53:  # no longer exact: number what there is
            key = np.unique(key, return_inverse=True)[1].astype(np.float64)
        key = key * most + column
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return layouts.part(first), inverse


def straggling(target: Target, layouts: Layouts) -> Array:
    """By how much the slowest of N nodes lags: their spread times the expected largest of N normal numbers.

    0.6 log2(N)^0.75 is that expectation within 0.07 for N up to 1,000.
    """
    nodes = np.maximum(layouts.ranks / target.cluster.node.devices, 1.0)
    return np.asarray(target.values["straggler"] * 0.6 * np.log2(nodes) ** 0.75)


def units(target: Target, layouts: Layouts) -> Units:
    """The units of each layout."""
    tokens = layouts.micro * target.sequence / layouts.cp
    size = np.zeros_like(tokens)
    forward, backward, core, host, beside = size, size, size, size, size
    for block in target.shapes.blocks:
        share = block.count / target.shapes.layers
        products = _products(target, layouts, block, tokens)
        attention = _attention(target, layouts, block, tokens)
        moving = _elementwise(target, layouts, block, tokens)
        forward = forward + share * (products[0] + attention[0] + moving[0])
        backward = backward + share * (products[1] + attention[1] + moving[1] + _accumulate(target, layouts, block))
        cheap = _cheap(target, layouts, block, tokens, moving[0])
        # Usual trainers repeat the core alone, or keep the output of a fused one and repeat what is cheap around it.
        again = attention[0] if target.unfused else cheap
        if target.is_literal:  # a core that would send again is kept, as routed feed-forwards are
            again = np.where(layouts.cp > 1, 0.0, attention[0]) + cheap / (2 if block.routed else 1)
        core = core + share * again
        host = host + share * target.host_seconds(block.routed)
        beside = beside + share * products[2]
    head = _head(target, layouts, tokens)
    table = tokens * target.shapes.hidden * target.stored / target.memory_rate
    given = exchanges(target, layouts, tokens, beside)
    given = interleaved_exchanges(target, layouts, given, forward + host / 3, backward + 2 * host / 3)
    return Units(forward, backward, core, host, 3 * table, 4 * table, *head, given)


def _products(target: Target, layouts: Layouts, block: BlockShape, tokens: Array) -> tuple[Array, Array, Array]:
    """Products of a block: once forward, for the gradients of inputs and of weights, and of these of column weights."""
    forward, backward, column = np.zeros_like(tokens), np.zeros_like(tokens), np.zeros_like(tokens)
    for product in block.products:
        ahead, inputs, weights = product_times(target, layouts, product, tokens)
        forward, backward = forward + ahead, backward + inputs + weights
        column = column + weights * (product.side is Side.COLUMN)
    return forward, backward, column


def _attention(target: Target, layouts: Layouts, block: BlockShape, tokens: Array) -> tuple[Array, Array]:
    """The core between query, key and value products."""
    shapes, values = target.shapes, target.values
    heads = shapes.heads / layouts.tp
    if target.unfused:
        return _unfused(target, layouts, heads)
    flops = 2 * tokens * heads * block.keys * (shapes.score_dim + shapes.value_dim)
    length = target.sequence / layouts.cp
    share = target.attention_share * length / (length + values["attention.ramp_tokens"])
    forward = flops / (target.attention_peak * share)
    return forward, 2.5 * forward / values["attention.backward"]


def _unfused(target: Target, layouts: Layouts, heads: Array) -> tuple[Array, Array]:
    """Two batched products over the full square, four backward, that write or read a score each, and between them
    kernels that pass over all scores: a causal softmax, which reads half, and what drops probabilities."""
    shapes, values, sequence = target.shapes, target.values, float(target.sequence)
    rate, processors = target.wide_rate * values["attention.batched"], target.cluster.device.processors
    count, rows = layouts.micro * heads, sequence / layouts.cp
    keys, score = np.full_like(rows, sequence), np.full_like(rows, shapes.score_dim)
    value = np.full_like(rows, shapes.value_dim)
    wide = target.stored / 2
    scores = count * rows * sequence / target.memory_rate * wide  # seconds of a byte of each
    outward = product_seconds(values, rate, processors, rows, keys, score, count, ramp="attention.ramp_k")
    inward = product_seconds(values, rate, processors, rows, value, keys, count, ramp="attention.ramp_k")
    between = values["attention.dropout_bytes"] * (target.arch.dropout > 0) * (not target.is_literal)
    eager = values["elementwise.eager"] if target.eager else 1.0
    forward = np.maximum(outward, scores * (2 + 2 * shapes.alibi)) + np.maximum(inward, 2 * scores)
    backward = 2 * np.maximum(outward, 2 * scores) + 2 * np.maximum(inward, 2 * scores)
    return (
        forward + scores * eager * (values["attention.score_bytes.forward"] + between),
        backward + scores * eager * (values["attention.score_bytes.backward"] + between),
    )


def _cheap(target: Target, layouts: Layouts, block: BlockShape, tokens: Array, moving: Array) -> Array:
    """What is cheap to repeat beside fused attention: norms, activations, and up-projections of latent attention."""
    repeated = target.values["recompute.cheap"] * moving
    for product in block.products:
        if product.latent:
            repeated = repeated + product_times(target, layouts, product, tokens)[0]
    return np.asarray(repeated)


def _elementwise(target: Target, layouts: Layouts, block: BlockShape, tokens: Array) -> tuple[Array, Array]:
    """Norms, residuals, activations, casts and routing: bytes through memory."""
    shapes, values = target.shapes, target.values
    ratio = block.width / shapes.hidden
    stream = np.where(layouts.sequence > 0, layouts.tp, 1.0)
    outer, behind = (each / stream for each in _stream_bytes(target))
    inner = (_head_bytes(target) + (6 if shapes.gated else 4) * ratio) / layouts.tp
    if target.low_precision:
        inner = inner + 3 * (3 + ratio) / layouts.tp
    factor = values["elementwise.eager"] if target.eager else 1.0
    scale = tokens * shapes.hidden * (target.stored / 2) / target.memory_rate
    kind = "fused" if target.captured else "copied"
    routed = shapes.active if block.routed else 0
    forward = factor * (outer + inner) + values[f"experts.{kind}.forward"] * routed
    backward = factor * (behind + values["elementwise.backward.inner"] * inner)
    return scale * forward, scale * (backward + values[f"experts.{kind}.backward"] * routed)


def _stream_bytes(target: Target) -> tuple[float, float]:
    """Bytes an element of the residual stream, forward and backward: norms and sums; masks; gradients of biases."""
    values, arch = target.values, target.arch
    forward = values["elementwise.stream"]
    backward = values["elementwise.backward.stream"] * forward
    if arch.dropout:
        forward, backward = forward + values["dropout.forward"], backward + values["dropout.backward"]
    return forward, backward + values["bias.backward"] * (arch.output_bias or arch.mlp_bias)


def _head_bytes(target: Target) -> float:
    """Bytes an element of the stream that move around the core of attention: queries, keys and values as it reads
    them, and their rotation where no kernel fuses it."""
    shapes, values = target.shapes, target.values
    queries, keys = shapes.heads * shapes.score_dim, shapes.kv_heads * shapes.score_dim
    if target.unfused:
        out = values["elementwise.heads.unfused"]
    else:
        out = values["elementwise.heads.fused"] * (queries + keys + shapes.kv_heads * shapes.value_dim) / shapes.hidden
    if target.eager and target.arch.rope is not None:
        out += values["elementwise.rotary"] * (queries + keys) / shapes.hidden
    return out


def _accumulate(target: Target, layouts: Layouts, block: BlockShape) -> Array:
    """Adding a micro-batch's weight gradients to those before: bytes a parameter."""
    tp, ep = layouts.tp, layouts.ep
    held = sum(
        product.n * product.k * product.experts / (tp * (ep if product.experts > 1 else 1))
        for product in block.products
    )
    wide = target.precision.reduce.num_bytes
    each = 4 * wide if target.legacy and wide > target.stored else 2 * wide if target.legacy else wide
    return np.asarray(held * each / target.memory_rate)


def _head(target: Target, layouts: Layouts, tokens: Array) -> tuple[Array, Array]:
    """Logits and loss: products stay in 16 bits, the loss in float32."""
    shapes, values, processors = target.shapes, target.values, target.cluster.device.processors
    vocab = np.ceil(shapes.vocab / layouts.tp / 64) * 64
    hidden = np.full_like(tokens, shapes.hidden)
    rate = target.wide_rate
    ahead = product_seconds(values, rate, processors, tokens, vocab, hidden)
    inputs = product_seconds(values, rate, processors, tokens, hidden, vocab)
    weights = product_seconds(values, rate, processors, vocab, hidden, tokens)
    loss = (
        tokens
        * vocab
        * values["logits.bytes.eager" if target.eager and not target.fused_loss else "logits.bytes.fused"]
        / target.memory_rate
    )
    return ahead + loss / 2, inputs + weights + loss / 2
