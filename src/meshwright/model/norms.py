"""Normalisation of the residual stream and of heads; statistics are at least float32 whatever the input."""

from __future__ import annotations

from torch import nn

from meshwright.arch.arch import Arch, Norm


def build_norm(arch: Arch, size: int) -> nn.Module:
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) or LayerNorm (arXiv:1607.06450) over the last dim."""
    match arch.norm:
        case Norm.RMS:
            return nn.RMSNorm(size, eps=arch.norm_eps)
        case Norm.LAYER:
            return nn.LayerNorm(size, eps=arch.norm_eps)
