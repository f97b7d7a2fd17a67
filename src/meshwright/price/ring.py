"""What gathers and scatters beside products show where they go round a ring in chunks (the program's `comm/ring.py`).

    product   | part | part | part | part |               all of it: (T - 1) max(hop, part) + part
    hop       | hop    | hop    | hop    |

    part      the product of one of T chunks of the tokens: small products are slower, so T of them are more than one
    hop       a chunk to the next rank, a call of its own; it slows what runs beside it by `overlap.slow`

The last hop of an input gradient's sum runs beside weight products too. Source of the decomposition: Wang et al. 2023
(ASPLOS, doi:10.1145/3567955.3567959).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.layout.axes import Axis
from meshwright.price.layouts import Array, Layouts
from meshwright.price.links import way
from meshwright.price.products import product_times
from meshwright.price.shapes import Side
from meshwright.price.target import Target

__all__ = ["ring_seconds"]


def ring_seconds(target: Target, layouts: Layouts, tokens: Array) -> tuple[Array, Array]:
    """What a mean block shows beside its products, forward and backward; micro-batches of `tokens` tokens a rank."""
    lap = _lap(target, layouts, tokens)
    forward, backward = np.zeros_like(tokens), np.zeros_like(tokens)
    for block in target.shapes.blocks:
        share = block.count / target.shapes.layers
        for product in block.products:
            if product.side is Side.WHOLE:
                continue
            whole = product_times(target, layouts, product, tokens)
            part = product_times(target, layouts, product, tokens / layouts.tp)
            after = whole[2] if product.side is Side.COLUMN else np.zeros_like(tokens)
            forward = forward + share * lap.shown(part[0], whole[0])
            backward = backward + share * lap.shown(part[1], whole[1], after)
    return forward, backward


@dataclass(frozen=True)
class _Lap:
    """T - 1 hops of so many seconds each."""

    hops: Array
    hop: Array
    slow: float

    def shown(self, part: Array, whole: Array, after: Array | float = 0.0) -> Array:
        """Beyond the whole product; `after` runs beside the last hop when the product is done."""
        late = (self.hops - 1) * np.maximum(self.hop - part, 0.0) + np.maximum(self.hop - part - after, 0.0)
        lost = np.maximum((self.hops + 1) * part - whole, 0.0)
        return np.asarray(lost + late + self.slow * np.minimum(self.hops * self.hop, self.hops * part + after))


def _lap(target: Target, layouts: Layouts, tokens: Array) -> _Lap:
    """A gather's time in T - 1 hops; it calls once, they each."""
    group = way(target, layouts.tp, layouts.stride(Axis.TP))
    hops = np.maximum(layouts.tp - 1, 1.0)
    once = group.gather(tokens * target.shapes.hidden * target.stored)
    return _Lap(hops, once / hops + group.call_s * (hops - 1) / hops, target.values["overlap.slow"])
