"""The routers of a model, told how a plan keeps the loads of its experts even."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshwright.model.balance import Balancing, move_bias
from meshwright.model.moe import RoutedMLP, Router
from meshwright.plan.norm import bias_names
from meshwright.plan.plan import Plan

__all__ = ["move_biases", "prepare_routers", "routers_of"]


def routers_of(units: Mapping[int, nn.Module]) -> dict[int, Router]:
    """Unit -> its router, of those of `units` that have one."""
    return {
        number: module.router for number, unit in units.items() for module in unit.modules()
        if isinstance(module, RoutedMLP)
    }  # fmt: skip


def prepare_routers(
    plan: Plan, units: Mapping[int, nn.Module], device: torch.device | str = "cpu", share: float = 1.0
) -> dict[str, Tensor]:
    """Give the routers of `units` their loss terms, of which this process adds `share`, and their biases.

    Returns the biases (E,) of all layers by name, also of layers that `units` has not: zeros, float32. None of them
    where loads are not kept even by bias.
    """
    experts = plan.arch.experts
    count = experts.count if experts is not None else 0
    biases = {name: torch.zeros(count, dtype=torch.float32, device=device) for name in bias_names(plan).values()}
    terms = Balancing(plan.moe.auxiliary_loss, plan.moe.z_loss, plan.batch.sequences, share)
    for unit, router in routers_of(units).items():
        router.balance = terms
        router.bias = biases[bias_names(plan)[unit]] if biases else None
    return biases


def move_biases(routers: Mapping[int, Router]) -> None:
    """After a step of one process whose last forward was the global batch: move the biases by its choices."""
    for router in routers.values():
        if router.bias is not None and router.counts is not None:
            move_bias(router.bias, router.counts)
