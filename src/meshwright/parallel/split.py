"""Weight products apart from the rest of backward.

    y (N, O) = x (N, I) W^T          N tokens, I inputs, O outputs

    forward          keeps x
    backward         g (N, O) -> gradient of x, g W; and the pair (g, x) goes
                       at once   into the flat gradient, W += g^T x, where the backward is whole
                       stashed   and there later, where it is split: nobody on another stage waits for it
    weight           the stashed products

A product written in place needs no gradient tensor of its own and no addition after it, so the modules of an eager run
are replaced whatever the schedule: see `direct`, and `tensor_direct` (Qi et al. 2023, arXiv:2401.10241, section 2.1,
for the split).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from meshwright.parallel.store import Store

__all__ = ["Place", "Stash", "WeightProducts", "Writes", "input_gradient"]


def input_gradient(gs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Cotangents (N, O_i) of products of one input with weights (O_i, I) -> its gradient (N, I), in one memory."""
    dx_NI = torch.mm(gs[0], weights[0])
    for g_NO, weight_OI in zip(gs[1:], weights[1:], strict=True):
        dx_NI.addmm_(g_NO, weight_OI)
    return dx_NI


class Writes(Protocol):
    """Where the product g^T x of a weight goes."""

    def write(self, g_NO: Tensor, x_NI: Tensor) -> None: ...


@dataclass(slots=True)
class Stash:
    """What a split backward of one unit and micro-batch leaves for its weight action.

    products   (place, g, x) of every linear
    gradients  of the other parameters: small, and of the same buckets, which would otherwise be written twice
    whole      edge and cotangent of a unit that nothing comes before: all of its backward is weight work
    """

    products: list[tuple[Writes, Tensor, Tensor]] = field(default_factory=list)
    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    whole: tuple[GradientEdge, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where the gradient of a weight lies."""

    store: Store
    name: str

    def write(self, g_NO: Tensor, x_NI: Tensor) -> None:
        """The product g^T x of a linear."""
        self.store.add_product(self.name, g_NO, x_NI)

    def write_rows(self, rows_N: Tensor, g_ND: Tensor) -> None:
        """g in the rows of a table that were looked up."""
        self.store.add_rows(self.name, rows_N, g_ND)


class WeightProducts:
    """The products of all weights in `stores`, and where they go: into `stash` during a split backward."""

    def __init__(self, stores: Iterable[Store]) -> None:
        self.stash: Stash | None = None
        self._places = {
            id(parameter): Place(store, name)
            for store in stores
            if store.bucket.trainable
            for name, parameter in store.parameters.items()
        }

    def place(self, weight_OI: Tensor) -> Place | None:
        """Where the gradient of a parameter lies; None where it is not trained."""
        return self._places.get(id(weight_OI))

    def add(self, place: Writes, g_NO: Tensor, x_NI: Tensor) -> None:
        if self.stash is None:
            place.write(g_NO, x_NI)
        else:
            self.stash.products.append((place, g_NO, x_NI.detach()))  # its graph would keep what entered the unit

    def backward(self, edge: GradientEdge, cotangent: Tensor, parameters: Sequence[nn.Parameter]) -> Stash:
        """Gradients of the input only: what is left for the weights."""
        stash = self.stash = Stash()
        torch.autograd.backward((edge,), (cotangent,))
        self.stash = None
        for parameter in parameters:
            if parameter.grad is not None:
                stash.gradients.append((parameter, parameter.grad))
                parameter.grad = None
        return stash

    def finish(self, stash: Stash) -> None:
        """Do what `stash` holds: products into the flat gradients, the rest into `.grad`, to be collected."""
        if stash.whole is not None:
            edge, cotangent = stash.whole
            torch.autograd.backward((edge,), (cotangent,))
        for place, g, x in stash.products:
            place.write(g, x)
        for parameter, gradient in stash.gradients:
            parameter.grad = gradient
        stash.products.clear()
