"""The expert axis, declared: each of its ranks owns a run of the experts, whose copies are those of `expert` alone.

ep 2, four experts      rank               0    1
                        experts            0 1  2 3       replicas: dp x cp
                        everything else    whole          replicas: dp x ep x cp
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.arch.arch import Arch
from meshwright.arch.tensors import LogicalAxis, Tensor
from meshwright.config.choices import Recompute
from meshwright.config.divisors import nearest_divisors
from meshwright.config.errors import RequestError
from meshwright.layout.axes import Axis, Degrees, whole
from meshwright.layout.groups import GroupName
from meshwright.layout.ownership import Cut
from meshwright.plan.plan import Plan

__all__ = ["check_runs", "cuts", "degree_rule", "problems", "replicas", "unrunnable"]


def cuts(degrees: Degrees, tensor: Tensor) -> tuple[Cut, ...]:
    """How the expert axis cuts a logical tensor."""
    if degrees.ep == 1:
        return ()
    return tuple(
        Cut(dim, whole(degrees, Axis.EP)) for dim, axis in enumerate(tensor.axes) if axis is LogicalAxis.EXPERTS
    )


def replicas(degrees: Degrees, tensor: Tensor) -> GroupName:
    """Whose ranks hold copies of a tensor: where experts are cut, they get the tokens of their ep peers, of whom none
    holds a copy."""
    return GroupName.EXPERT if cuts(degrees, tensor) else GroupName.DENSE


def degree_rule(arch: Arch, ep: int) -> str | None:
    """What `ep` ranks break; None where every rank owns as many experts."""
    if ep > 1 and arch.experts is None:
        return "ep needs a model with experts"
    if arch.experts is not None and arch.experts.count % ep:
        return f"ep must divide the {arch.experts.count} experts"
    return None


def check_runs(plan: Plan) -> None:
    """Raise a RequestError where `plan` can be priced but no executor runs its experts so."""
    problems = list(unrunnable(plan))
    if problems:
        raise RequestError.joined(problems)


def unrunnable(plan: Plan) -> Iterator[RequestError]:
    """What of `plan` no executor does with experts."""
    if plan.arch.experts is None:
        return
    experts = f"{plan.arch.experts.count} experts"
    if plan.execution.compile:
        rule = f"rows of {experts} are known when a batch is, and a compiled unit would be made again for each of them"
        yield RequestError("parallel.compile = true", rule, ("parallel.compile = false",))
    if plan.execution.recompute is Recompute.SELECTIVE:
        rule = f"has no recipe for blocks with {experts}"
        works = ('parallel.recompute = "full"', 'parallel.recompute = "none"')
        yield RequestError('parallel.recompute = "selective"', rule, works)


def problems(plan: Plan) -> Iterator[RequestError]:
    """Every rule of the expert axis that `plan` breaks."""
    rule = degree_rule(plan.arch, plan.degrees.ep)
    if rule:
        count = plan.arch.experts.count if plan.arch.experts else 1
        works = [f"mesh.ep = {size}" for size in nearest_divisors(count, plan.degrees.ep)]
        yield RequestError(f"mesh.ep = {plan.degrees.ep}", rule, works)
