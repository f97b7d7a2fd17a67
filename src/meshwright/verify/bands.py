"""How far rounding alone may carry a run from float64: the tolerance of each figure.

A sum of n products, each partial sum rounded with unit roundoff u, is off by at most λ·sqrt(n)·u of the sum of
magnitudes, with probability near 1 (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J.
Sci. Comput. 41(5), 2019, theorem 3.1: rounding errors behave as independent and centred). Errors of K operations in a
row are independent as well, so they add as sqrt(K) (the same paper, section 4, for products of matrices).

    figure of a gradient  <=  λ · sqrt(K) · (u_store + sqrt(n)·u_sum)

    K        roundings on the way: 12 in a block (2 norms, 7 products, softmax, gate, residual), forward and backward
    n        longest sum: feed-forward, hidden, vocabulary or sequence; tokens of the batch for a weight's gradient
    u_store  roundoff of the compute dtype; u_sum of sums in it: products of 16-bit numbers are summed in float32
    λ        4: a chance of 2·exp(-λ²/2) < 1e-3 that one sum passes it

Weights: their own rounding, and what a gradient's error moves them: at most rate · band · M_gradient a step for SGD
(clipped as the gradient is), divided by epsilon for AdamW (its step has a slope of at most 1/epsilon), relative to the
smallest scale of a weight. A start value is rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.config.choices import Dtype, OptimizerKind
from meshwright.optim.update import clip_coefficient
from meshwright.plan.plan import Plan
from meshwright.verify.figure import scale
from meshwright.verify.trace import Figures, Kind, Quantity

__all__ = ["EXACT", "Band", "rounding_band", "unit_roundoff"]

_LAMBDA = 4.0
_ROUNDINGS_OF_A_BLOCK = 12
_DIGITS = {Dtype.FLOAT64: 53, Dtype.FLOAT32: 24, Dtype.FLOAT16: 11, Dtype.BFLOAT16: 8}


@dataclass(frozen=True, slots=True)
class Band:
    """The largest figure of difference that is allowed, by what is compared."""

    loss: float
    activation: float
    gradient: float
    norm: float
    update: float
    start: float = 1e-12

    def of(self, kind: Kind) -> float:
        match kind:
            case Kind.ACTIVATION:
                return self.activation
            case Kind.GRADIENT:
                return self.gradient
            case Kind.START:
                return self.start
            case _:
                return self.update


EXACT = Band(loss=1e-12, activation=1e-12, gradient=1e-12, norm=1e-12, update=1e-12)
"""float64: reordered sums stay far below it, every fault far above."""


def unit_roundoff(dtype: Dtype) -> float:
    """Half the distance from 1 to the next number of a format."""
    return 2.0 ** -_DIGITS[dtype]


def rounding_band(plan: Plan, figures: Figures, rate: float, steps: int) -> Band:
    """The band of the plan's precision; `EXACT` in float64. `figures` are the reference's."""
    if plan.precision.compute is Dtype.FLOAT64:
        return EXACT
    arch, store = plan.arch, unit_roundoff(plan.precision.compute)
    sums = max(unit_roundoff(Dtype.FLOAT32), unit_roundoff(Dtype.FLOAT64))
    reduce = unit_roundoff(plan.precision.reduce)
    depth = _ROUNDINGS_OF_A_BLOCK * (arch.layers + 1)
    widest = max(arch.ffn, arch.hidden, arch.vocab, plan.data.sequence_length, arch.heads * arch.head_dim)
    tokens = plan.batch.sequences * plan.data.sequence_length
    forward = _LAMBDA * math.sqrt(depth) * (store + math.sqrt(widest) * sums)
    parts = plan.accumulation * plan.degrees.ranks
    gradient = _LAMBDA * math.sqrt(2 * depth) * (store + math.sqrt(max(widest, tokens)) * sums)
    gradient += _LAMBDA * math.sqrt(parts) * reduce
    return Band(forward, forward, gradient, gradient, _update(plan, figures, rate, steps, gradient), store)


def _update(plan: Plan, figures: Figures, rate: float, steps: int, gradient: float) -> float:
    clipped = min((clip_coefficient(norm, plan.optimizer.clip_norm) for norm in figures.norms), default=1.0)
    error = gradient * figures.largest_of(Kind.GRADIENT) * clipped
    if plan.optimizer.kind is OptimizerKind.ADAMW:
        error = min(error / plan.optimizer.eps, 2.0)
    weights = [Quantity(Kind.LAST, key.split("/", 1)[1]) for key in figures.largest if key.startswith(f"{Kind.LAST}/")]
    smallest = min(scale(figures, weight) for weight in weights)
    rounding = unit_roundoff(plan.precision.compute) + math.sqrt(steps) * unit_roundoff(plan.precision.master)
    return _LAMBDA * rounding + steps * rate * error / smallest
