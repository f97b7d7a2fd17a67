"""What a step does for the load of experts, beside what routers do themselves (`model.balance`).

    forward of a micro-batch     the choices of each router are added up; making it again counts nothing
    norm                         they ride on the packed sum of the step, by the ranks that routed the tokens
    after it                     every rank moves the biases of all layers alike, if the step is taken

A token of a tensor group is routed by each of its ranks: the first one counts it, and each adds its share of the terms.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshwright.layout.axes import Coordinates
from meshwright.model.balance import move_bias
from meshwright.model.routers import prepare_routers, routers_of
from meshwright.plan.norm import NUM_TERMS, bias_names, counts_at
from meshwright.plan.plan import Plan

__all__ = ["Balancer"]


class Balancer:
    """The routers of one rank's `units`, by unit number, over its steps."""

    def __init__(self, plan: Plan, units: Mapping[int, nn.Module], at: Coordinates, device: torch.device) -> None:
        self._plan, self._counts_here = plan, at.tp == 0
        self.biases = prepare_routers(plan, units, device, 1.0 / plan.degrees.tp)
        """(E,) float32 of every routed layer of the model, by name; empty where nothing is biased."""
        self._routers = routers_of(units)
        self._counts: dict[int, Tensor] = {}
        self._terms: Tensor | None = None

    def begin(self, scale: float) -> None:
        """Open a step whose losses are multiplied by `scale` in backward."""
        self._counts.clear()
        self._terms = None
        for router in self._routers.values():
            router.balance.scale = scale

    def count(self, unit: int) -> None:
        """Add what the forward of a unit has just routed."""
        router = self._routers.get(unit)
        if router is None or router.counts is None:
            return
        if self.biases:
            counted = self._counts.get(unit)
            self._counts[unit] = router.counts if counted is None else counted + router.counts
        if router.terms is not None:
            terms = router.terms.double()
            self._terms = terms if self._terms is None else self._terms + terms

    def pack(self, packed: Tensor) -> None:
        """Write this rank's counts and terms into the vector that the world adds up."""
        if not self._counts_here:
            return
        for unit, counts_E in self._counts.items():
            packed[counts_at(self._plan, unit)] += counts_E
        if self._terms is not None:
            packed[-NUM_TERMS:] += self._terms

    def finish(self, packed: Tensor) -> None:
        """The step is taken: move the biases by the counts of the global batch."""
        for unit, name in bias_names(self._plan).items() if self.biases else ():
            move_bias(self.biases[name], packed[counts_at(self._plan, unit)])
