"""The expert axis, declared: which numbers of experts can be cut over it."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.arch.arch import Arch
from meshwright.config.divisors import nearest_divisors
from meshwright.config.errors import RequestError
from meshwright.plan.plan import Plan

__all__ = ["degree_rule", "problems"]


def degree_rule(arch: Arch, ep: int) -> str | None:
    """What `ep` ranks break; None where every rank owns as many experts."""
    if ep > 1 and arch.experts is None:
        return "ep needs a model with experts"
    if arch.experts is not None and arch.experts.count % ep:
        return f"ep must divide the {arch.experts.count} experts"
    return None


def problems(plan: Plan) -> Iterator[RequestError]:
    """Every rule of the expert axis that `plan` breaks."""
    rule = degree_rule(plan.arch, plan.degrees.ep)
    if rule:
        count = plan.arch.experts.count if plan.arch.experts else 1
        works = [f"mesh.ep = {size}" for size in nearest_divisors(count, plan.degrees.ep)]
        yield RequestError(f"mesh.ep = {plan.degrees.ep}", rule, works)
