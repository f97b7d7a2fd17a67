"""The ownership of every logical tensor under a plan: what each strategy's table says, joined."""

from __future__ import annotations

from functools import lru_cache

from meshwright.arch.parameters import tensors
from meshwright.layout.ownership import Ownership
from meshwright.plan.plan import Plan
from meshwright.plan.stages import stage_of_unit
from meshwright.plan.strategies import expert as expert_axis
from meshwright.plan.strategies import tensor as tensor_axis


@lru_cache(maxsize=64)
def owners(plan: Plan) -> tuple[Ownership, ...]:
    """One entry a logical tensor, in order of execution."""
    stage = stage_of_unit(plan)
    return tuple(
        Ownership(
            tensor,
            stages=tuple(sorted({stage[reader] for reader in tensor.readers})),
            cuts=(*expert_axis.cuts(plan.degrees, tensor), *tensor_axis.cuts(plan.degrees, plan.arch, tensor)),
            replicas=expert_axis.replicas(plan.degrees, tensor),
            partial=tensor_axis.partial(plan, tensor),
        )
        for tensor in tensors(plan.arch)
    )
