"""The one vector that all ranks add up at the end of a step: float64, summed over the world.

SQUARED NONFINITE OVERFLOW STOP    four numbers of every step
choices of each expert             layer by layer, where a bias evens their loads
the auxiliary and the z term       where routers add any
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

from meshwright.config.choices import Balance
from meshwright.plan.plan import Plan


class NormPart(IntEnum):
    """What stands at each index of the packed vector; every element of a gradient is counted by its owner alone."""

    SQUARED = 0  # sum of squares of the gradient
    NONFINITE = 1  # gradient elements that are not finite
    OVERFLOW = 2  # ranks whose loss scale overflowed
    STOP = 3  # ranks that were asked to stop


NORM_FLOATS = len(NormPart)
NUM_TERMS = 2


def norm_floats(plan: Plan) -> int:
    """Numbers of the whole vector."""
    experts = plan.arch.experts
    counts = len(bias_names(plan)) * experts.count if experts else 0
    return NORM_FLOATS + counts + (NUM_TERMS if has_terms(plan) else 0)


def has_terms(plan: Plan) -> bool:
    """Whether routers add terms to what is differentiated; these are the last numbers of the vector then."""
    return bool(plan.moe.auxiliary_loss or plan.moe.z_loss)


@lru_cache(maxsize=32)
def bias_names(plan: Plan) -> dict[int, str]:
    """Unit -> the name of its router's bias, of every routed block; none where nothing is biased."""
    if plan.moe.balance is not Balance.BIAS:
        return {}
    units = (layer + 1 for layer in range(plan.arch.layers) if plan.arch.is_routed(layer))
    return {unit: f"{plan.arch.unit_name(unit)}.mlp.router.bias" for unit in units}


def counts_at(plan: Plan, unit: int) -> slice:
    """Where the choices of a unit's experts stand in the vector."""
    assert plan.arch.experts is not None
    count = plan.arch.experts.count
    first = NORM_FLOATS + list(bias_names(plan)).index(unit) * count
    return slice(first, first + count)
