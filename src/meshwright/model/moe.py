"""A feed-forward of experts: each token goes to the few that its router chooses, and nothing is dropped.

    N  tokens   D  hidden   E  experts   K  chosen by a token   F  width of an expert   M = N*K

    x_ND -- router --> scores_NE -- the K largest --> chosen_NK, weights_NK
      |                                                 |
      +-- one row a choice, by expert --> x_MD          |          row    0 1 2 3 4 5
          | expert 0 | expert 1 | ... | unrouted |      |          token  0 2 3 0 1 ..      sorted by expert, then token
               one product each, none of "unrouted"     |          expert 0 0 0 1 1 ..
          y_MD * weight --> back to tokens, K rows summed --> y_ND [+ shared experts(x_ND)]

Padding is not routed: its rows lie behind those of the last expert, and come back as zeros. Scores are the softmax of
the router's product, both in at least float32 (Mixtral, arXiv:2401.04088, section 2.1; Qwen3, arXiv:2505.09388). How
the load of experts is kept even is `model.balance`'s matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.arch.arch import Arch
from meshwright.model.balance import Balancing, Routed, attach_terms
from meshwright.model.mlp import build_activation, build_mlp
from meshwright.model.rows import Rows

__all__ = [
    "Bounds", "ExpertMLP", "GroupProducts", "Read", "RoutedMLP", "Router", "Spread", "bounds_of", "group_products",
    "precise_product",
]  # fmt: skip

Bounds = Sequence[tuple[int, int]]
"""(first, last + 1) of the rows of each expert."""

GroupProducts = Callable[[Tensor, Sequence[Tensor], Bounds], Sequence[Tensor]]
"""(x (M, I), weights (E, O, I), rows of each expert) -> (M, O) for each weight: see `group_products`."""

Read = Callable[[Tensor], list[int]]
"""How numbers reach the host."""

Spread = Callable[[Tensor, Tensor, Read], tuple[Tensor, Bounds, Callable[[Tensor], Tensor]]]
"""(rows (M, D) by expert, choices of each expert (E,), `read`) -> the rows (R, D) that this rank's experts get, which
are those of each, and what brings their outputs (R, D) back (M, D)."""


def precise_product(x_ND: Tensor, weight_ED: Tensor) -> Tensor:
    """(N, D) -> (N, E), in at least float32."""
    dtype = torch.promote_types(x_ND.dtype, torch.float32)
    return nn.functional.linear(x_ND.to(dtype), weight_ED.to(dtype))


def group_products(x_MI: Tensor, weights: Sequence[Tensor], bounds: Bounds) -> Sequence[Tensor]:
    """Rows [low, high) of x times the weight of each expert; rows that no expert has come out as zeros."""
    end = bounds[-1][1]
    out = []
    for weight_EOI in weights:
        parts = [x_MI[low:high] @ each.t() for (low, high), each in zip(bounds, weight_EOI.unbind(0), strict=True)]
        if end < len(x_MI):
            parts.append(x_MI.new_zeros(len(x_MI) - end, weight_EOI.shape[1]))
        out.append(torch.cat(parts))
    return out


class Router(nn.Module):
    """Which experts each token goes to, and how much each of their outputs counts."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        assert arch.experts is not None
        self.count, self.active, self.normalise = arch.experts.count, arch.experts.active, arch.experts.normalise
        self.weight = nn.Parameter(torch.empty(self.count, arch.hidden))
        self.product: Callable[[Tensor, Tensor], Tensor] = precise_product
        self.balance = Balancing()
        self.bias: Tensor | None = None  # (E,) float32: moves choices, never weights; no parameter, see `balance`
        self.counts: Tensor | None = None  # (E,) int64 choices of each expert in the last forward
        self.terms: Tensor | None = None  # (2,) what it added to the loss

    def forward(self, x_ND: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Routed]:
        """(N, D) -> chosen (N, K) int64, E where a token is not routed; weights (N, K); what was routed where."""
        logits_NE = self.product(x_ND, self.weight)
        scores_NE = logits_NE.softmax(-1)
        ranked_NE = scores_NE.detach()
        if self.bias is not None:
            ranked_NE = ranked_NE + self.bias.to(ranked_NE.dtype)
        chosen_NK = ranked_NE.topk(self.active, -1).indices
        weights_NK = scores_NE.gather(1, chosen_NK)
        if self.normalise:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        routed = Routed.of(logits_NE, scores_NE, chosen_NK, rows)
        self.counts = routed.counts
        if rows.valid is not None:
            chosen_NK = chosen_NK.masked_fill(~rows.valid.flatten()[:, None], self.count)
        return chosen_NK, weights_NK, routed


class ExpertMLP(nn.Module):
    """The feed-forwards of all experts, gated or plain, on rows sorted by expert."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        assert arch.experts is not None
        wide = arch.experts.count, arch.experts.ffn, arch.hidden
        self.products: GroupProducts = group_products
        self.gate = nn.Parameter(torch.empty(wide)) if arch.gated else None
        self.up = nn.Parameter(torch.empty(wide))
        self.activation = build_activation(arch.activation)
        self.down = nn.Parameter(torch.empty(wide[0], arch.hidden, wide[1]))

    def forward(self, x_MD: Tensor, bounds: Bounds) -> Tensor:
        """(M, D) -> (M, D)."""
        if self.gate is None:
            (up_MF,) = self.products(x_MD, (self.up,), bounds)
            wide_MF = self.activation(up_MF)
        else:
            gate_MF, up_MF = self.products(x_MD, (self.gate, self.up), bounds)
            wide_MF = self.activation(gate_MF) * up_MF
        (y_MD,) = self.products(wide_MF, (self.down,), bounds)
        return y_MD


class RoutedMLP(nn.Module):
    """The feed-forward of a routed block.

    `enter` and `leave` are where a tensor axis begins and ends; `read` is how the numbers of rows reach the host;
    `spread` reaches experts that other ranks have; `whole` adds up the choices (B, E) of sequences that are cut.
    """

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        assert arch.experts is not None
        shared = arch.experts.shared * arch.experts.ffn
        self.router = Router(arch)
        self.experts = ExpertMLP(arch)
        self.shared = build_mlp(dataclasses.replace(arch, ffn=shared)) if shared else None
        self.enter: Callable[[Tensor], Tensor] = _same
        self.leave: Callable[[Tensor], Tensor] = _same
        self.read: Read = Tensor.tolist
        self.spread: Spread | None = None
        self.whole: Callable[[Tensor], Tensor] = _same

    def forward(self, x_ND: Tensor, rows: Rows) -> Tensor:
        """(N, D) -> (N, D)."""
        x_ND = self.enter(x_ND)
        chosen_NK, weights_NK, routed = self.router(x_ND, rows)
        order_M, places_NK = _sorted(chosen_NK)
        tokens_M = order_M // chosen_NK.shape[1]
        x_MD: Tensor = _Dispatched.apply(x_ND, tokens_M, places_NK)  # type: ignore[no-untyped-call]
        if self.spread is None:
            y_MD: Tensor = self.experts(x_MD, bounds_of(self.read(routed.counts)))
        else:  # names are used again: nothing outlives its use
            x_MD, bounds, back = self.spread(x_MD, routed.counts, self.read)
            y_MD = self.experts(x_MD, bounds)
            y_MD = back(y_MD)
        weighted_MD = y_MD * weights_NK.flatten()[order_M].to(y_MD.dtype)[:, None]
        y_ND: Tensor = _Combined.apply(weighted_MD, tokens_M, places_NK)  # type: ignore[no-untyped-call]
        if self.shared is not None:
            y_ND = y_ND + self.shared(x_ND, rows)
        if self.training and self.router.balance.has_terms:
            terms = routed.terms(self.router.balance, self.whole(routed.choices))
            self.router.terms = terms.detach()
            if torch.is_grad_enabled():
                y_ND = attach_terms(y_ND, terms, self.router.balance)
        return self.leave(y_ND)


def _same(x: Tensor) -> Tensor:
    return x


def _sorted(chosen_NK: Tensor) -> tuple[Tensor, Tensor]:
    """-> the choices (M,) by expert, those of one expert in the order of tokens; and where (N, K) each one lies."""
    order_M = chosen_NK.flatten().argsort(stable=True)
    places_M = torch.empty_like(order_M)
    places_M[order_M] = torch.arange(len(order_M), device=order_M.device)
    return order_M, places_M.view(chosen_NK.shape)


def bounds_of(counts: Sequence[int]) -> Bounds:
    """The rows of each expert, from how many they are."""
    bounds, end = [], 0
    for count in counts:
        bounds.append((end, end + count))
        end += count
    return bounds


class _Dispatched(torch.autograd.Function):
    """A row a choice; backward adds the rows of each token in the order of its choices, on every device."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, tokens_M: Tensor, places_NK: Tensor) -> Tensor:
        ctx.save_for_backward(places_NK)
        return x_ND.index_select(0, tokens_M)

    @staticmethod
    def backward(ctx: Any, g_MD: Tensor) -> tuple[Tensor, None, None]:
        (places_NK,) = ctx.saved_tensors
        return g_MD[places_NK].sum(1), None, None


class _Combined(torch.autograd.Function):
    """The conjugate of `_Dispatched`."""

    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, tokens_M: Tensor, places_NK: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_M)
        return y_MD[places_NK].sum(1)

    @staticmethod
    def backward(ctx: Any, g_ND: Tensor) -> tuple[Tensor, None, None]:
        (tokens_M,) = ctx.saved_tensors
        return g_ND.index_select(0, tokens_M), None, None
