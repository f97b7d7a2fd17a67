"""Routed feed-forwards of an eager run: weight gradients go straight to their place, expert by expert.

    product of one expert     y = x[low:high] W_e^T        W_e += g[low:high]^T x[low:high]     at once or stashed
    router                    in at least float32          W += g^T x                           the same

An expert that no token chose has a gradient of exactly zero. Sums are those of `split`; with a tensor axis every rank
has columns of all experts (`plan.strategies.tensor`), routes every token, and has its part of the router's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.conjugate import copied, gathered, scattered, summed
from meshwright.comm.custom import all_reduce
from meshwright.model.moe import Bounds, RoutedMLP, group_products, precise_product
from meshwright.parallel.direct import apply_direct
from meshwright.parallel.split import Place, WeightProducts
from meshwright.parallel.store import Store

__all__ = ["apply_experts", "routed_mlps", "tensor_parallel_experts", "whole_choices"]


def apply_experts(units: Iterable[nn.Module], products: WeightProducts, read: Callable[[Tensor], list[float]]) -> None:
    """Replace the products of routers and experts of these units, in place; `read` brings their loads to the host."""
    direct = _Direct(products)
    for mlp in routed_mlps(units):
        mlp.router.product, mlp.experts.products = direct.route, direct.experts
        mlp.read = partial(_rows, read)


def tensor_parallel_experts(mlp: RoutedMLP, group: str, sequence: bool, products: WeightProducts) -> None:
    """Put a routed feed-forward between f and f* of a registered tensor group, or g and g* under `sequence`."""
    mlp.enter = partial(gathered if sequence else copied, group=group)
    mlp.leave = partial(scattered if sequence else summed, group=group)
    if mlp.shared is not None:
        apply_direct([mlp.shared], products)


def whole_choices(units: Iterable[nn.Module], group: str) -> None:
    """Shares of a term are of whole sequences, which a registered context group has cut: add their choices up."""
    for mlp in routed_mlps(units):
        mlp.whole = partial(all_reduce, group=group)


def routed_mlps(units: Iterable[nn.Module]) -> Iterable[RoutedMLP]:
    """Every routed feed-forward of these units, in order."""
    return (module for unit in units for module in unit.modules() if isinstance(module, RoutedMLP))


def _rows(read: Callable[[Tensor], list[float]], counts_E: Tensor) -> list[int]:
    return [int(each) for each in read(counts_E)]


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Where the gradients of all experts' weights lie, and which rows each has."""

    store: Store
    name: str
    bounds: Bounds

    def write(self, g_MO: Tensor, x_MI: Tensor) -> None:
        self.store.add_grouped(self.name, g_MO, x_MI, self.bounds)


class _Direct:
    """The forwards; what is not trained takes the plain one."""

    def __init__(self, products: WeightProducts) -> None:
        self._products = products

    def route(self, x_ND: Tensor, weight_ED: Tensor) -> Tensor:
        """(N, D) -> (N, E), as `model.moe.precise_product`."""
        place = self._products.place(weight_ED)
        if place is None:
            return precise_product(x_ND, weight_ED)
        out: Tensor = _Route.apply(x_ND, weight_ED, self._products, place)  # type: ignore[no-untyped-call]
        return out

    def experts(self, x_MI: Tensor, weights: Sequence[Tensor], bounds: Bounds) -> Sequence[Tensor]:
        """`model.moe.GroupProducts`: of one input, so that its gradient adds up in one memory."""
        places = [self._products.place(weight) for weight in weights]
        if None in places:
            return group_products(x_MI, weights, bounds)
        grouped = [_Grouped(place.store, place.name, bounds) for place in places if place is not None]
        out: tuple[Tensor, ...] = _Experts.apply(x_MI, bounds, self._products, grouped, *weights)  # type: ignore[no-untyped-call]
        return out


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: WeightProducts, place: Place) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products, ctx.place = products, place
        return precise_product(x, weight)

    @staticmethod
    def backward(ctx: Any, g_NE: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.products.add(ctx.place, g_NE, x.to(g_NE.dtype))
        return torch.mm(g_NE, weight.to(g_NE.dtype)).to(x.dtype), None, None, None


class _Experts(torch.autograd.Function):
    """Products of one input: one step of autograd for all experts and weights."""

    @staticmethod
    def forward(
        ctx: Any, x_MI: Tensor, bounds: Bounds, products: WeightProducts, places: Sequence[_Grouped], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_MI, *weights)
        ctx.bounds, ctx.products, ctx.places = bounds, products, places
        return tuple(_multiply(x_MI, weight.transpose(1, 2), bounds) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_MI, *weights = ctx.saved_tensors
        for place, g in zip(ctx.places, gradients, strict=True):
            ctx.products.add(place, g, x_MI)
        dx_MI = None
        if ctx.needs_input_grad[0]:
            dx_MI = _multiply(gradients[0], weights[0], ctx.bounds)
            for g, weight in zip(gradients[1:], weights[1:], strict=True):
                for (low, high), each in zip(ctx.bounds, weight, strict=True):
                    dx_MI[low:high].addmm_(g[low:high], each)
        return dx_MI, None, None, None, *[None] * len(weights)


def _multiply(x_MI: Tensor, weight_EIO: Tensor, bounds: Bounds) -> Tensor:
    """(M, I), (E, I, O) -> (M, O): rows of each expert by its matrix, rows of none are zero."""
    y_MO = x_MI.new_empty(x_MI.shape[0], weight_EIO.shape[2])
    for (low, high), each in zip(bounds, weight_EIO, strict=True):
        torch.mm(x_MI[low:high], each, out=y_MO[low:high])
    y_MO[bounds[-1][1] :].zero_()
    return y_MO
