"""Seconds of matrix products of any shape, over arrays.

A product is cut into tiles, tiles into waves over the device's processors: the last wave is rarely full.

    128 x 128 tiles of a 4096 x 1536 result on 108 processors:  384 tiles = 3 waves and 60 tiles
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshwright.price.layouts import Array, Layouts
from meshwright.price.shapes import Product
from meshwright.price.target import Target

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.72), (64, 64, 0.50))
"""Rows, columns, share of the rate of large tiles."""


def product_seconds(
    values: Mapping[str, float],
    rate: Array | float,
    processors: int,
    m: Array | float,
    n: Array | float,
    k: Array | float,
    count: Array | float = 1.0,
    ramp: str = "matrix.ramp_k",
) -> Array:
    """`count` products (m, k) x (k, n) at `rate` FLOP/s of large ones."""
    m, n, k, count = (np.asarray(each, dtype=np.float64) for each in (m, n, k, count))
    best = np.full(np.broadcast_shapes(m.shape, n.shape, k.shape, count.shape), np.inf)
    for rows, columns, share in _TILES:
        waves = count * np.ceil(m / rows) * np.ceil(n / columns) / processors
        shown = (1 - values["matrix.wave"]) * np.maximum(waves, 1.0) + values["matrix.wave"] * np.ceil(waves)
        np.minimum(best, shown * (rows * columns / share), out=best)
    ideal = best * (2 * processors) * k / rate
    seconds: Array = ideal * (1 + values[ramp] / k) * alignment(values, n, k)
    return seconds


def alignment(values: Mapping[str, float], n: Array, k: Array) -> Array:
    """What dimensions that are no multiple of 64, 8 or 4 cost, as a factor."""
    unaligned = (n % 64 != 0) | (k % 64 != 0)
    eight = (n % 8 != 0) | (k % 8 != 0)
    four = (n % 4 != 0) | (k % 4 != 0)
    extra = values["matrix.unaligned"] * unaligned
    extra = np.where(four, values["matrix.odd"], np.where(eight, values["matrix.four"], extra))
    return np.asarray(1 + extra, dtype=np.float64)


def product_times(target: Target, layouts: Layouts, product: Product, tokens: Array) -> tuple[Array, Array, Array]:
    """Forward, gradient of the input, gradient of the weight."""
    shapes, processors = target.shapes, target.cluster.device.processors
    rate = target.product_rate
    n, k, m = np.full_like(tokens, product.n), np.full_like(tokens, product.k), tokens
    count = np.ones_like(tokens)
    if product.experts == shapes.experts and product.experts > 1:
        # Even routing: rows of one expert, whole tiles of 64.
        m = np.ceil(tokens * shapes.active * layouts.ep / shapes.experts / 64) * 64
        count = shapes.experts / layouts.ep
        rate = rate * target.values["matrix.grouped"]
    tp = layouts.tp
    if product.kv:
        n = (product.n - product.kv) / tp + product.kv / np.minimum(tp, shapes.kv_heads)
    elif product.n == shapes.experts and product.experts == 1 and shapes.active:
        rate = target.wide_rate
    else:
        n = n / tp if product.side.value == "column" else n
    k = k / tp if product.side.value == "row" else k
    moved = count * (m * k + k * n + m * n) * target.stored / target.memory_rate
    return tuple(  # type: ignore[return-value]
        np.maximum(product_seconds(target.values, rate, processors, *dims, count), moved)
        for dims in ((m, n, k), (m, k, n), (n, k, m))
    )
