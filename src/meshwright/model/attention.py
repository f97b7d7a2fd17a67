"""Causal self-attention with grouped heads (Ainslie et al. 2023, arXiv:2305.13245).

B  sequences    S  tokens of each    N = B*S    D  hidden    H  query heads    G  key/value heads    K  head_dim
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from meshwright.arch.arch import Arch
from meshwright.model.products import Products, separate_products
from meshwright.model.rope import rotate
from meshwright.model.rows import Rows, Sight

Core = Callable[[Tensor, Tensor, Tensor, Sight], Tensor]
"""Queries (B, S, H, K), keys and values (B, S, G, K), which see which -> (B, S, H, K): see `attend`."""

Rotation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Queries (B, S, H, K), keys (B, S, G, K), cosines and sines (B or 1, S, 1, K/2) -> both, turned: see `rotate_both`."""


class Attention(nn.Module):
    """Queries, keys and values from the stream, rotated; attention within rows' masks; projected back."""

    def __init__(self, arch: Arch, layer: int) -> None:
        super().__init__()
        self.products: Products = separate_products
        self.core: Core = attend
        self.rotation: Rotation = rotate_both
        self.head_dim = arch.head_dim
        self.windowed = arch.window(layer) > 0
        queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        self.query = nn.Linear(arch.hidden, queries, bias=arch.qkv_bias)
        self.key = nn.Linear(arch.hidden, keys, bias=arch.qkv_bias)
        self.value = nn.Linear(arch.hidden, keys, bias=arch.qkv_bias)
        self.output = nn.Linear(queries, arch.hidden, bias=arch.output_bias)
        self.query_norm = nn.RMSNorm(arch.head_dim, eps=arch.norm_eps) if arch.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(arch.head_dim, eps=arch.norm_eps) if arch.qk_norm else nn.Identity()

    def forward(self, x_ND: Tensor, rows: Rows) -> Tensor:
        """(N, D) -> (N, D)."""
        query, key, value = self.products(x_ND, (self.query, self.key, self.value))
        y_ND: Tensor = self.output(self.mixed(query, key, value, rows))
        return y_ND

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
        """What lies between the products: (N, H*K), (N, G*K), (N, G*K) -> (N, H*K)."""
        heads_BSHK = (*rows.positions.shape, -1, self.head_dim)
        q_BSHK = self.query_norm(query.view(heads_BSHK))
        k_BSGK = self.key_norm(key.view(heads_BSHK))
        v_BSGK = value.view(heads_BSHK)
        if rows.cos is not None and rows.sin is not None:
            q_BSHK, k_BSGK = self.rotation(q_BSHK, k_BSGK, rows.cos, rows.sin)
        y_BSHK = self.core(q_BSHK, k_BSGK, v_BSGK, rows.sight(self.windowed))
        return y_BSHK.flatten(0, 1).flatten(1)


def rotate_both(q_BSHK: Tensor, k_BSGK: Tensor, cos_BS1F: Tensor, sin_BS1F: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, each turned by `model.rope.rotate`."""
    return rotate(q_BSHK, cos_BS1F, sin_BS1F), rotate(k_BSGK, cos_BS1F, sin_BS1F)


def attend(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, sight: Sight) -> Tensor:
    """Softmax attention, scaled by 1/sqrt(K); each of the G key heads serves H / G query heads. -> (B, S, H, K).

    Without a mask it is causal by flag, which lets the fused kernels skip the upper half.
    """
    y_BHSK = nn.functional.scaled_dot_product_attention(
        q_BSHK.transpose(1, 2),
        k_BSGK.transpose(1, 2),
        v_BSGK.transpose(1, 2),
        attn_mask=sight.mask,
        is_causal=sight.mask is None,
        enable_gqa=q_BSHK.shape[2] != k_BSGK.shape[2],
    )
    return y_BHSK.transpose(1, 2)
