"""Dropout whose masks do not depend on the layout: what falls is a function of where in the world a feature is.

    N  tokens held      D  features held

    (seed, step, sample id, offset)  ->  token key     once a micro-batch, carried by Rows (`counter.token_keys`)
    (token key, layer, site)         ->  row key       once a site
    (row key, feature pair)          ->  two 32-bit numbers, each compared with p

A rank that holds other tokens or features computes the same bits for the same global element, a recomputed forward
repeats them, and a resumed run goes on with them: there is no generator state to save.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor, nn

from meshwright.model.counter import advance, mix_
from meshwright.model.rows import Rows


class Site(IntEnum):
    """The places of dropout; attention probabilities are none of them."""

    EMBEDDING = 0
    ATTENTION_OUTPUT = 1
    MLP_OUTPUT = 2


def site_key(site: Site, layer: int) -> Tensor:
    """() int64 on the CPU. A tensor, so that the blocks of a compiled model share one graph."""
    return torch.tensor(advance(1 + len(Site) * layer + site), device="cpu")


def dropout_mask(keys_N: Tensor, site: Tensor, first_feature: int, features: int, probability: float) -> Tensor:
    """Token keys (N,) and a site key () -> (N, features) bool, True where global feature first_feature + j is kept."""
    first = first_feature // 2
    pairs = torch.arange(first + 1, (first_feature + features + 1) // 2 + 1, device=keys_N.device)
    numbers = mix_(mix_(keys_N + site)[:, None] + pairs * advance(1))
    fields = numbers.view(torch.int32)[:, first_feature - 2 * first :][:, :features]
    return fields >= min(round(probability * (1 << 32)), (1 << 32) - 1) - (1 << 31)


class Dropout(nn.Module):
    """Zeroes features with `probability` and scales the others by its inverse (Srivastava et al. 2014, section 10)."""

    def __init__(self, probability: float, site: Site, layer: int = 0) -> None:
        super().__init__()
        if not 0 <= probability < 1:
            raise ValueError(f"dropout {probability} is no probability below 1")
        self.probability = probability
        self.site = site_key(site, layer)

    def forward(self, x_ND: Tensor, rows: Rows) -> Tensor:
        """(N, D) -> (N, D); rows hold the keys of the same N tokens. Identity in evaluation."""
        if not self.training or self.probability == 0:
            return x_ND
        keep_ND = dropout_mask(rows.token_keys, self.site, rows.first_feature, x_ND.shape[1], self.probability)
        return torch.where(keep_ND, x_ND * (1 / (1 - self.probability)), 0)

    def extra_repr(self) -> str:
        return f"p={self.probability}"
