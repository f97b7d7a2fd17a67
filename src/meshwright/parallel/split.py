"""Weight products apart from the rest of backward.

    y (N, O) = x (N, I) W^T          N tokens, I inputs, O outputs

    forward          keeps x
    backward         g (N, O) -> gradient of x, g W; and the pair (g, x) goes
                       at once   into the flat gradient, W += g^T x, where the backward is whole
                       stashed   and there later, where it is split: nobody on another stage waits for it
    weight           the stashed products

A product written in place needs no gradient tensor of its own and no addition after it, so the linears of an eager run
are replaced whatever the schedule (Qi et al. 2023, arXiv:2401.10241, section 2.1, for the split).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge

from meshwright.model.decoder import Head
from meshwright.model.loss import loss
from meshwright.parallel.store import Store

__all__ = ["Place", "Stash", "WeightProducts"]


@dataclass(slots=True)
class Stash:
    """What a split backward of one unit and micro-batch leaves for its weight action.

    products   (place, g, x) of every linear
    gradients  of the other parameters: small, and of the same buckets, which would otherwise be written twice
    whole      edge and cotangent of a unit that nothing comes before: all of its backward is weight work
    """

    products: list[tuple[Place, Tensor, Tensor]] = field(default_factory=list)
    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    whole: tuple[GradientEdge, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where the gradient of a weight lies."""

    store: Store
    name: str

    def write(self, g: Tensor, x: Tensor) -> None:
        self.store.add_product(self.name, g, x)


class WeightProducts:
    """The products of all linears over `stores`, and where they go: set `stash` around a split backward."""

    def __init__(self, stores: Iterable[Store]) -> None:
        self.stash: Stash | None = None
        self._places = {
            id(parameter): Place(store, name)
            for store in stores
            if store.bucket.trainable
            for name, parameter in store.parameters.items()
        }

    def apply(self, units: Iterable[nn.Module]) -> None:
        """Replace the forwards of these units' linears, in place, once; parameters are the stores'.

        Raises ValueError for a unit whose linears were replaced before.
        """
        for unit in units:
            for module in unit.modules():
                if isinstance(module, nn.Linear):
                    if "forward" in vars(module):
                        raise ValueError("the linears of this unit have been replaced already")
                    module.forward = _Forward(module, self)  # type: ignore[assignment]  # of one module
                elif isinstance(module, Head):
                    module.criterion = self._projected_loss

    def linear(self, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x W^T + b: (N, I) -> (N, O)."""
        place = self._places.get(id(weight_OI))
        if place is None:
            return nn.functional.linear(x_NI, weight_OI, bias_O)
        out: Tensor = _Product.apply(x_NI, weight_OI, bias_O, self, place)  # type: ignore[no-untyped-call]
        return out

    def place(self, weight_OI: Tensor) -> Place | None:
        """Where the gradient of a parameter lies; None where it is not trained."""
        return self._places.get(id(weight_OI))

    def add(self, place: Place, g_NO: Tensor, x_NI: Tensor) -> None:
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

    def _projected_loss(self, x_ND: Tensor, weight_VD: Tensor, labels_BS: Tensor, count: Tensor) -> Tensor:
        """`model.decoder.Criterion`."""
        return loss(self.linear(x_ND, weight_VD), labels_BS, count)


class _Forward:
    """The forward of one replaced linear."""

    def __init__(self, linear: nn.Linear, products: WeightProducts) -> None:
        self._linear, self._products = linear, products

    def __call__(self, x_NI: Tensor) -> Tensor:
        return self._products.linear(x_NI, self._linear.weight, self._linear.bias)


class _Product(torch.autograd.Function):
    """x W^T + b, whose weight gradient goes to a place instead of back through autograd."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: WeightProducts, place: Place
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products, ctx.place = products, place
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.products.add(ctx.place, g, x)
        dx = torch.mm(g, weight) if ctx.needs_input_grad[0] else None
        return dx, None, g.sum(0) if ctx.needs_input_grad[2] else None, None, None
