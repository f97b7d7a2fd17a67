"""How the load of experts is kept even: two loss terms, and a bias that needs none.

    N  tokens   E  experts   K  chosen by a token   B, S  sequences, length   G  sequences of the global batch

    f_be  share of the K S_b choices of sequence b that went to expert e         S_b  its tokens without padding
    p_be  mean score of expert e over its tokens

    auxiliary   c/G sum_b E sum_e f_be p_be      1 at even load, its gradient through p alone (Switch Transformers,
                                                 arXiv:2101.03961, eq. 4, a sequence as in DeepSeek-V3,
                                                 arXiv:2412.19437, eq. 17-20)
    z           c/G sum_b mean_t (log sum_e exp logit_te)^2                      (ST-MoE, arXiv:2202.08906, eq. 5)
    bias        b_e += rate * sign(mean load - load_e) after a step, from the choices of the global batch; added to the
                scores for the choice alone                                      (Wang et al. 2024, arXiv:2408.15664)

Terms are means over the tokens of a sequence, so they do not depend on how sequences are spread over ranks, stages and
micro-batches. The loss that is reported is without them. A unit's graph ends at its borders, so a term enters backward
where it arises: `attach_terms` hands its gradient to the graph beside the unit's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.model.rows import Rows

__all__ = ["BIAS_RATE", "Balancing", "Routed", "attach_terms", "move_bias"]

BIAS_RATE = 1e-3
"""What a step moves a bias by (arXiv:2408.15664, section 4.1)."""


@dataclass(slots=True)
class Balancing:
    """What one model's routers share. `share`: the part of a term that this rank adds, where several see one token;
    `scale`: what losses are multiplied by in backward (float16)."""

    auxiliary: float = 0.0
    z: float = 0.0
    sequences: int = 1
    share: float = 1.0
    scale: float = 1.0

    @property
    def has_terms(self) -> bool:
        return bool(self.auxiliary or self.z)


@dataclass(frozen=True, slots=True)
class Routed:
    """What a router did with one micro-batch."""

    logits: Tensor
    """(N, E)"""
    scores: Tensor
    """(N, E)"""
    choices: Tensor
    """(B, E) int64: how often each sequence, or what is here of it, chose each expert"""
    counts: Tensor
    """(E,) int64: the same of all of them"""
    valid: Tensor | None
    """(B, S) bool"""
    active: int

    @classmethod
    def of(cls, logits_NE: Tensor, scores_NE: Tensor, chosen_NK: Tensor, rows: Rows) -> Routed:
        went_NE = torch.zeros_like(scores_NE, dtype=torch.int64).scatter_(1, chosen_NK, 1)
        if rows.valid is not None:
            went_NE = went_NE * rows.valid.flatten()[:, None]
        choices_BE = went_NE.view(*rows.offsets.shape, -1).sum(1)
        return cls(logits_NE, scores_NE, choices_BE, choices_BE.sum(0), rows.valid, chosen_NK.shape[1])

    def terms(self, balance: Balancing, choices_BE: Tensor) -> Tensor:
        """(2,) what these tokens add to the loss of the global batch: the auxiliary and the z term, weighted.

        `choices_BE`: those of whole sequences, which may be cut: every rank adds what its own tokens do.
        """
        none = self.scores.new_zeros(())
        tokens_B1 = (choices_BE.sum(1, keepdim=True) // self.active).clamp(min=1).to(self.scores.dtype)
        auxiliary = balance.auxiliary * self.auxiliary(choices_BE, tokens_B1) if balance.auxiliary else none
        z = balance.z * self.z(tokens_B1) if balance.z else none
        return torch.stack((auxiliary, z)) / balance.sequences

    def auxiliary(self, choices_BE: Tensor, tokens_B1: Tensor) -> Tensor:
        """() the sum over these sequences of E sum_e f_be p_be, of these tokens' part of p."""
        scores_BSE = self.scores.view(len(self.choices), -1, self.choices.shape[1])
        if self.valid is not None:
            scores_BSE = scores_BSE * self.valid[..., None]
        shares_BE = choices_BE.to(scores_BSE.dtype) / (self.active * tokens_B1)
        return scores_BSE.shape[2] * (shares_BE * (scores_BSE.sum(1) / tokens_B1)).sum()

    def z(self, tokens_B1: Tensor) -> Tensor:
        """() the sum over these sequences of the mean squared log-sum-exp of a token, of these tokens' part of it."""
        z_BS = self.logits.logsumexp(-1).square().view(len(self.choices), -1)
        if self.valid is not None:
            z_BS = z_BS * self.valid
        return (z_BS / tokens_B1).sum()


def attach_terms(y_ND: Tensor, terms: Tensor, balance: Balancing) -> Tensor:
    """`y_ND` itself; in backward each of `terms` (2,) receives its gradient as well."""
    out: Tensor = _Attached.apply(y_ND, terms, balance)  # type: ignore[no-untyped-call]
    return out


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, terms: Tensor, balance: Balancing) -> Tensor:
        ctx.factor, ctx.terms = balance.share * balance.scale, terms.detach()
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        return g, torch.full_like(ctx.terms, ctx.factor), None


@torch.no_grad()
def move_bias(bias_E: Tensor, counts_E: Tensor) -> None:
    """One step of the bias (E,) by the choices (E,) of the global batch, in place."""
    loads_E = counts_E.to(torch.float64)
    bias_E.add_((loads_E.mean() - loads_E).sign(), alpha=BIAS_RATE)
