"""The expert axis, executed: rows go to the ranks that have their experts, and back.

    ep 2, experts 0 1 | 2 3

    rows by expert            sent           received, by source      by expert        products, and the same way back
    rank 0   0 0 1 2 3   ->   0 0 1 | 2 3    0 0 1 | 0 1 1            0 0 0 1 1 1
    rank 1   0 1 1 2 2   ->   0 1 1 | 2 2    2 3 | 2 2                2 2 2 3

Which row goes where is known when a router has chosen: ranks tell each other their loads, then a host reads both once.
Rows of padding stay. Every rank takes part in every exchange, with rows or without. Weights of choices are applied
where the token is, so nothing but rows travels. Declared half: `plan.strategies.expert`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.conjugate import exchanged
from meshwright.layout.axes import Coordinates
from meshwright.model.moe import Bounds, Read, bounds_of
from meshwright.parallel.experts import routed_mlps
from meshwright.plan.plan import Plan
from meshwright.plan.strategies.expert import Exchange, rows_by_place

__all__ = ["ExpertAxis"]


class ExpertAxis:
    """The exchanges of one rank's units over the registered group `group`, and what they moved in a step."""

    def __init__(self, plan: Plan, at: Coordinates, group: str, units: Mapping[int, nn.Module]) -> None:
        self.routed: dict[tuple[int, int], Exchange] = {}
        """What the forwards of the step exchanged, by unit and micro-batch."""
        self._spreads: dict[int, _Spread] = {}
        for number, unit in units.items():
            for mlp in routed_mlps([unit]):
                mlp.spread = self._spreads[number] = _Spread(plan.degrees.ep, at.ep, group)

    def begin(self) -> None:
        """Open a step."""
        self.routed.clear()

    def record(self, unit: int, micro: int) -> None:
        """Keep what the forward of a unit has just exchanged."""
        spread = self._spreads.get(unit)
        if spread is not None and spread.exchange is not None:
            self.routed[unit, micro] = spread.exchange


class _Spread:
    """`model.moe.Spread` of one feed-forward."""

    def __init__(self, ep: int, place: int, group: str) -> None:
        self._ep, self._place, self._group = ep, place, group
        self.exchange: Exchange | None = None  # of the last forward

    def __call__(self, x_MD: Tensor, counts_E: Tensor, read: Read) -> tuple[Tensor, Bounds, Callable[[Tensor], Tensor]]:
        once = [1] * self._ep
        arriving_PL = exchanged(counts_E.view(self._ep, -1), once, once, self._ep, self._group)
        numbers = read(torch.cat((counts_E, arriving_PL.flatten())))
        loads, came = numbers[: len(counts_E)], numbers[len(counts_E) :]
        sent, received = list(rows_by_place(loads, self._ep)), list(rows_by_place(came, self._ep))
        self.exchange = Exchange(self._place, tuple(sent), tuple(received))
        own, rows = len(came) // self._ep, len(x_MD)
        by_expert = [source * own + expert for expert in range(own) for source in range(self._ep)]
        x_RD = _ordered(exchanged(x_MD, sent, received, sum(received), self._group), came, by_expert)

        def back(y_RD: Tensor) -> Tensor:
            y_RD = _ordered(y_RD, [came[run] for run in by_expert], _inverse(by_expert))
            y_MD: Tensor = exchanged(y_RD, received, sent, rows, self._group)
            return y_MD

        return x_RD, bounds_of([sum(came[expert::own]) for expert in range(own)]), back


def _ordered(x_RD: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Runs of `sizes` rows of x, in another order; x itself where it is the same."""
    if list(order) == sorted(order):
        return x_RD
    out: Tensor = _Ordered.apply(x_RD, sizes, order)  # type: ignore[no-untyped-call]
    return out


class _Ordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
        ctx.sizes, ctx.order = sizes, order
        return _reorder(x_RD, sizes, order)

    @staticmethod
    def backward(ctx: Any, g_RD: Tensor) -> tuple[Tensor, None, None]:
        return _reorder(g_RD, [ctx.sizes[run] for run in ctx.order], _inverse(ctx.order)), None, None


def _reorder(x_RD: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    runs = torch.split(x_RD, list(sizes))
    return torch.cat([runs[run] for run in order])


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
