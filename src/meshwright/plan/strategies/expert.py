"""The expert axis, declared: each of its ranks owns a run of the experts, whose copies are those of `expert` alone.

ep 2, four experts      rank               0    1
                        experts            0 1  2 3       replicas: dp x cp
                        everything else    whole          replicas: dp x ep x cp

Ranks of the axis read different data, and send each other the rows that their experts are chosen for: one a choice.

                     of what                          to the rank at each place            payload
    forward          loads: choices of each expert    those of its experts                 8 E
                     rows, sorted by expert           as many as it was chosen for         rows sent x D
                     their outputs                    as many as it sent                   rows received x D
    backward         gradients of the outputs         as rows, forward                     rows sent x D
                     gradients of the rows            as outputs, forward                  rows received x D

How many rows that is, a router decides. Predictions take even loads; a step that was taken is counted by its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.arch.arch import Arch
from meshwright.arch.tensors import LogicalAxis, Tensor
from meshwright.config.divisors import nearest_divisors
from meshwright.config.errors import RequestError
from meshwright.layout.axes import Axis, Degrees, whole
from meshwright.layout.groups import GroupName
from meshwright.layout.ownership import Cut
from meshwright.plan.action import Action, Kind, Op
from meshwright.plan.norm import has_terms
from meshwright.plan.operation import Operation
from meshwright.plan.plan import Plan
from meshwright.plan.strategies.call import Call
from meshwright.plan.strategies.tensor import micro_tokens

__all__ = [
    "Exchange", "Routed", "calls", "check_runs", "cuts", "degree_rule", "even_exchange", "even_loads",
    "everywhere", "fullest_exchange", "problems", "replicas", "rows_by_place", "unrunnable",
]  # fmt: skip

_COUNT_BYTES = 8  # an int64


@dataclass(frozen=True, slots=True)
class Exchange:
    """Rows of one unit and micro-batch that the rank at `place` of an ep group sends to each place, and has from it."""

    place: int
    sent: tuple[int, ...]
    received: tuple[int, ...]


Routed = Mapping[tuple[int, int], Exchange]
"""(unit, micro-batch) -> what was exchanged there."""


def even_loads(choices: int, experts: int) -> list[int]:
    """How often each expert is chosen where all are alike; the first ones take what does not divide."""
    share, rest = divmod(choices, experts)
    return [share + (expert < rest) for expert in range(experts)]


def rows_by_place(loads: Sequence[int], ep: int) -> tuple[int, ...]:
    """Rows for each of `ep` ranks, from those of each expert."""
    own = len(loads) // ep
    return tuple(sum(loads[first : first + own]) for first in range(0, len(loads), own))


def even_exchange(plan: Plan, place: int) -> Exchange:
    """What the rank at `place` exchanges where all loads are even, without padding."""
    assert plan.arch.experts is not None
    ep, experts = plan.degrees.ep, plan.arch.experts
    sent = rows_by_place(even_loads(micro_tokens(plan) * experts.active, experts.count), ep)
    return Exchange(place, sent, (sent[place],) * ep)


def fullest_exchange(plan: Plan, place: int) -> Exchange:
    """What the rank at `place` exchanges where every token of all ranks of the axis chooses as many of its experts as
    there are: none gets more rows."""
    assert plan.arch.experts is not None
    ep, experts = plan.degrees.ep, plan.arch.experts
    own = experts.count // ep
    most = micro_tokens(plan) * min(experts.active, own)
    rest = micro_tokens(plan) * experts.active - most
    others = iter(even_loads(rest, ep - 1))
    return Exchange(place, tuple(most if each == place else next(others) for each in range(ep)), (most,) * ep)


def everywhere(exchange: Exchange) -> Routed:
    """The same in every unit and micro-batch."""
    return defaultdict(lambda: exchange)


def calls(plan: Plan, action: Action, kind: Kind = Kind.TRAIN, exchange: Exchange | None = None) -> Iterator[Call]:
    """What one compute action sends for its experts; without `exchange`, with even loads, by the rank at place 0.

    On a context axis the terms of a sequence need the choices of all its tokens: ranks add them up in the forwards of
    training.
    """
    if not plan.arch.is_routed_unit(action.unit):
        return
    assert plan.arch.experts is not None
    count, forward = plan.arch.experts.count, action.op in (Op.FORWARD, Op.RECOMPUTE)
    if plan.degrees.ep > 1 and action.op is not Op.WEIGHT:
        exchange = exchange or even_exchange(plan, 0)
        if forward:
            own = count // plan.degrees.ep
            yield Call(GroupName.EP, Operation.ALL_TO_ALL, count * _COUNT_BYTES, (count - own) * _COUNT_BYTES)
        width = plan.arch.hidden * plan.precision.sent_bytes
        for rows in (exchange.sent, exchange.received):
            total = sum(rows)
            yield Call(GroupName.EP, Operation.ALL_TO_ALL, total * width, (total - rows[exchange.place]) * width)
    if plan.degrees.cp > 1 and forward and kind is Kind.TRAIN and has_terms(plan):
        yield Call(GroupName.CP, Operation.ALL_REDUCE, plan.batch.micro * count * _COUNT_BYTES)


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


def problems(plan: Plan) -> Iterator[RequestError]:
    """Every rule of the expert axis that `plan` breaks."""
    rule = degree_rule(plan.arch, plan.degrees.ep)
    if rule:
        count = plan.arch.experts.count if plan.arch.experts else 1
        works = [f"mesh.ep = {size}" for size in nearest_divisors(count, plan.degrees.ep)]
        yield RequestError(f"mesh.ep = {plan.degrees.ep}", rule, works)
