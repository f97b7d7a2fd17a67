"""Attention of some queries to a block of keys, and its exact gradients once all blocks have been seen.

    forward     o = softmax(q k^T / sqrt(K)) v over the keys of the block, and l, the logarithm of its sum
    merging     o = o1 + (o2 - o1) sigmoid(l2 - l1), l = log(e^l1 + e^l2): softmax over both (Rabe and Staats 2021,
                arXiv:2112.05682)
    backward    with o and l of all keys, p = e^(q k^T / sqrt(K) - l) are the whole softmax's own probabilities, so the
                gradients of blocks add up (Dao et al. 2022, arXiv:2205.14135, appendix B)

A query that sees nothing of a block has o = 0 and l = -inf there: weight 0.

    B  sequences    Q  queries of each    Z  keys    H  heads, G of keys    K  elements of a head

CPUs have one fused kernel for every dtype. CUDA's takes 16 bits without a mask; everything else is products in at least
float32, a run of queries at a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["Gradients", "attend_block", "block_gradients", "merge_"]

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of queries (B, Q, H, K), of keys and of values (B, Z, G, K)."""

_CHUNK_ELEMENTS = 1 << 24  # scores worked on at a time where nothing fuses them
_WIDEST_FUSED = 256  # elements of a head that CUDA's kernel takes, in steps of 8

_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cuda = torch.ops.aten._scaled_dot_product_flash_attention
_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


def attend_block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """q (B, Q, H, K), k and v (B, Z, G, K), mask (B or 1, 1, Q, Z) -> (B, Q, H, K), its l (B, H, Q)."""
    heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if q.device.type == "cpu":
        out, log_sum = _cpu(*heads, 0.0, causal, attn_mask=_added(mask, q.dtype))
    elif _fuses(q, mask):
        out, log_sum = _cuda(*heads, 0.0, causal)[:2]
    else:
        out, log_sum = _plain(*heads, mask, causal)
    if mask is not None:
        log_sum = log_sum.masked_fill(~mask.any(-1), -math.inf)
    return out.transpose(1, 2), log_sum


def merge_(out: Tensor, log_sum: Tensor, other: Tensor, other_log_sum: Tensor) -> None:
    """Add what another block gave the same queries: out (B, Q, H, K), log_sum (B, H, Q), both in place."""
    weight = torch.sigmoid(other_log_sum - log_sum).transpose(1, 2)[..., None]
    out.lerp_(other.to(out.dtype), weight.to(out.dtype))
    log_sum.copy_(torch.logaddexp(log_sum, other_log_sum))


def block_gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, mask: Tensor | None, causal: bool
) -> Gradients:
    """Gradients by one block; g, out (B, Q, H, K) and log_sum (B, H, Q) are those over all keys."""
    of_out, result = g.transpose(1, 2), out.transpose(1, 2)
    heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    log_sum = log_sum.contiguous()
    if q.device.type == "cpu":
        found = _cpu_backward(of_out, *heads, result, log_sum, 0.0, causal, attn_mask=_added(mask, q.dtype))
    elif _fuses(q, mask):
        lengths, nothing = (q.shape[1], k.shape[1]), q.new_zeros(2, dtype=torch.int64)
        found = _cuda_backward(
            of_out.contiguous(), *heads, result.contiguous(), log_sum, None, None, *lengths, 0.0, causal,
            nothing, nothing,
        )  # fmt: skip
    else:
        found = _plain_gradients(of_out, *heads, result, log_sum, mask, causal)
    of_q, of_k, of_v = (each.transpose(1, 2) for each in found)
    return of_q, of_k, of_v


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to scores: 0 where a key is seen."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _fuses(q: Tensor, mask: Tensor | None) -> bool:
    width = q.shape[-1]
    return mask is None and q.element_size() == 2 and width % 8 == 0 and width <= _WIDEST_FUSED


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """As the fused kernels: (B, H, Q, K), (B, G, Z, K) -> (B, H, Q, K) in q's dtype, (B, H, Q)."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dtype = torch.promote_types(q.dtype, torch.float32)
    log_sum = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
    values = _by_key_head(v, v, dtype)
    for run in _runs(q, k):
        scores = _scores(q, k, run, mask, causal, dtype)
        sums = scores.logsumexp(-1, keepdim=True)
        weights = (scores - sums.nan_to_num(neginf=0.0)).exp_()
        out[:, :, run] = (weights @ values).flatten(1, 2).to(q.dtype)
        log_sum[:, :, run] = sums.flatten(1, 2)[..., 0]
    return out, log_sum


def _plain_gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, mask: Tensor | None, causal: bool
) -> Gradients:
    dtype = log_sum.dtype
    of_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    of_k, of_v = torch.zeros(k.shape, dtype=dtype, device=k.device), torch.zeros(v.shape, dtype=dtype, device=v.device)
    keys, values, scale = _by_key_head(k, k, dtype), _by_key_head(v, v, dtype), 1 / math.sqrt(q.shape[-1])
    for run in _runs(q, k):
        of_out, queries, given, sums = (
            _by_key_head(each[:, :, run], k, dtype) for each in (g, q, out, log_sum[..., None])
        )
        p = (_scores(q, k, run, mask, causal, dtype) - sums).exp_()
        of_v += (p.mT @ of_out).sum(2)
        of_scores = p * (of_out @ values.mT - (of_out * given).sum(-1, keepdim=True)) * scale
        of_k += (of_scores.mT @ queries).sum(2)
        of_q[:, :, run] = (of_scores @ keys).flatten(1, 2).to(q.dtype)
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def _scores(q: Tensor, k: Tensor, run: slice, mask: Tensor | None, causal: bool, dtype: torch.dtype) -> Tensor:
    """(B, G, H / G, run, Z), -inf where a key is not seen."""
    scores = _by_key_head(q[:, :, run], k, dtype) @ _by_key_head(k, k, dtype).mT / math.sqrt(q.shape[-1])
    if causal:
        queries = torch.arange(run.start, run.start + scores.shape[-2], device=q.device)
        scores.masked_fill_(queries[:, None] < torch.arange(k.shape[2], device=q.device), -math.inf)
    if mask is not None:
        scores.masked_fill_(~mask[:, :, None, run], -math.inf)
    return scores


def _by_key_head(x: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, H, Q, K) -> (B, G, H / G, Q, K): queries by the key head that serves them."""
    return torch.unflatten(x.to(dtype), 1, (k.shape[1], -1))


def _runs(q: Tensor, k: Tensor) -> list[slice]:
    """Queries worked on at a time."""
    size = max(1, _CHUNK_ELEMENTS // max(q.shape[0] * q.shape[1] * k.shape[2], 1))
    return [slice(low, min(low + size, q.shape[2])) for low in range(0, q.shape[2], size)]
