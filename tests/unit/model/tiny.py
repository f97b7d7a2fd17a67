"""A tiny architecture and what the model's tests need around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.arch.arch import Activation, Arch, Norm
from meshwright.layout.rows import whole_rows
from meshwright.model import Decoder, Rows, build_decoder, initialise, rows_to_torch

LLAMA = Arch("llama", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=101)
GPT2 = replace(
    LLAMA,
    family="gpt2",
    kv_heads=4,
    norm=Norm.LAYER,
    activation=Activation.GELU_TANH,
    gated=False,
    rope=None,
    max_positions=64,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    tie_embeddings=True,
)


def decoder_of(arch: Arch, dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
    """A decoder with start values and, so that nothing hides, biases and gains that are neither 0 nor 1."""
    decoder = build_decoder(arch, dtype=dtype, device="cpu")
    initialise(decoder, arch, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise.to(dtype))
    return decoder


def rows_of(
    arch: Arch,
    batch: int = 2,
    length: int = 16,
    *,
    documents: np.ndarray | None = None,
    dtype: torch.dtype = torch.float64,
    step: int = 0,
    first_sample: int = 5,
    **options: Any,
) -> Rows:
    sample_ids = np.arange(first_sample, first_sample + batch, dtype=np.int64)
    return rows_to_torch(whole_rows(step, sample_ids, length, documents), arch, dtype=dtype, **options)


def tokens_of(arch: Arch, batch: int = 2, length: int = 16, seed: int = 0) -> Tensor:
    return torch.randint(0, arch.vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits_of(decoder: Decoder, tokens: Tensor, rows: Rows) -> Tensor:
    """(B, S, V), without a graph."""
    with torch.no_grad():
        return decoder(tokens, rows).view(*tokens.shape, -1)


def documents(*lengths: int) -> np.ndarray:
    """(1, S) document ids of documents of these lengths."""
    return np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)[None]
