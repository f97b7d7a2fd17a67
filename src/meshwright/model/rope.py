"""Rotary positions and how they are stretched.

    B  sequences      S  tokens of each      H  heads      K  elements of a head      F = K / 2  frequencies

Pairs are half-split: element f turns with element f + F (the layout of published Llama weights), not with its
neighbour. Tables are computed in float64 once a micro-batch, for exactly the positions at hand.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.arch.arch import Rope, RopeScaling


def rotary_tables(rope: Rope, head_dim: int, positions_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Positions (B, S) int64 -> cosines and sines, each (B, S, 1, F) in `dtype`."""
    frequencies_F = rotary_frequencies(rope, head_dim).to(positions_BS.device)
    angles_BS1F = (positions_BS.to(torch.float64)[..., None] * frequencies_F)[:, :, None]
    scale = attention_scale(rope)
    return (angles_BS1F.cos() * scale).to(dtype), (angles_BS1F.sin() * scale).to(dtype)


def rotate(x_BSHK: Tensor, cos_BS1F: Tensor, sin_BS1F: Tensor) -> Tensor:
    """Turns every pair by its angle, in the tables' dtype; returns x's dtype."""
    first, second = x_BSHK.to(cos_BS1F.dtype).chunk(2, dim=-1)
    turned = torch.cat((first * cos_BS1F - second * sin_BS1F, second * cos_BS1F + first * sin_BS1F), dim=-1)
    return turned.to(x_BSHK.dtype)


def rotary_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """(F,) float64 on the CPU, radians a token."""
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    frequencies_F = rope.theta**-exponents_F
    match rope.scaling:
        case RopeScaling.NONE:
            return frequencies_F
        case RopeScaling.LINEAR:  # positional interpolation, Chen et al. 2023, arXiv:2306.15595
            return frequencies_F / rope.factor
        case RopeScaling.LLAMA3:
            unstretched_F = _llama3_share(rope, frequencies_F)
        case RopeScaling.YARN:
            unstretched_F = _yarn_share(rope, head_dim)
    return frequencies_F * (unstretched_F + (1 - unstretched_F) / rope.factor)


def attention_scale(rope: Rope) -> float:
    """What yarn multiplies queries and keys by (arXiv:2309.00071, eq. 22); 1 for every other scaling."""
    if rope.scaling is not RopeScaling.YARN:
        return 1.0
    if rope.attention_factor:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _temperature(rope.factor, rope.mscale) / _temperature(rope.factor, rope.mscale_all_dim)
    return _temperature(rope.factor, 1.0)


def _temperature(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3_share(rope: Rope, frequencies_F: Tensor) -> Tensor:
    """(F,) in [0, 1]: how much of each frequency stays as it is, by its turns within the original context.

    From `low` turns on (all stretched) to `high` turns (none), linearly (the Llama 3.1 model card's rope scaling).
    """
    turns_F = rope.original_positions * frequencies_F / (2 * math.pi)
    return ((turns_F - rope.low) / (rope.high - rope.low)).clamp(0, 1)


def _yarn_share(rope: Rope, head_dim: int) -> Tensor:
    """(F,) in [0, 1]: as above, but linear in the index of the frequency (arXiv:2309.00071, section 3.2)."""

    def index_of(turns: float) -> float:
        """The (fractional) frequency that makes so many turns within the original context."""
        return head_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # published implementations avoid the singularity so
    indices_F = torch.arange(head_dim // 2, dtype=torch.float64, device="cpu")
    return 1 - ((indices_F - low) / width).clamp(0, 1)
