"""What a layout costs in memory, traffic and time, before it runs. No torch.

    cluster, catalogue     what there is: devices, links, stacks, prices, each number with its source
    constants              what was measured or fitted, in one table
    layouts, estimate      closed forms over arrays of layouts (compute, exchanges, replicas, schedule, times, memory)
    simulate, traffic      folds of the very program
    price, text, explain   one plan

The package may be called: `meshwright.price(plan, cluster="h100-sxm")`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.plan.plan import Plan
    from meshwright.price.cluster import Cluster
    from meshwright.price.price import Price


class _CallablePackage(ModuleType):
    """Users call what developers import from, and both are named `price`."""

    def __call__(self, plan: Plan, cluster: str | Cluster = "local", rank: int = 0) -> Price:
        """See `meshwright.price.price.price`."""
        from meshwright.price.price import price

        return price(plan, cluster, rank)


sys.modules[__name__].__class__ = _CallablePackage
