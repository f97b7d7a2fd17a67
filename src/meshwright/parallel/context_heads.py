"""All tokens of a group for some of the heads, in exchange for some of the tokens and all heads; as custom operations.

    U ranks, n tokens of each            rank 0: heads 0 1      rank 1: heads 0 1
    before   n tokens, H heads           tokens 0..n            tokens n..2n
    after    U * n tokens, H / U heads   head 0                 head 1

    B  sequences    n  tokens held    H  query heads, G of keys    K  elements of a head
    h = H / U, g = G / U or 1: heads of a rank after it

Queries, keys and values go in one all-to-all, packed by whom they are for. Where there are fewer key heads than ranks,
U / G ranks need the same one: each gets a copy, and their gradients are summed.
Source: Jacobs et al. 2023, arXiv:2309.14509.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.arch.heads import own_kv_heads
from meshwright.comm import operations
from meshwright.comm.custom import finish, size_of
from meshwright.comm.registry import lookup

__all__ = ["heads_for_tokens", "tokens_for_heads"]


def heads_for_tokens(q: Tensor, k: Tensor, v: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, n, H, K), k and v (B, n, G, K) -> own heads of each, (B, U * n, h, K) and twice (B, U * n, g, K).

    All-to-all over `group`, forward and backward. They are views of what arrived.
    """
    ways = size_of(group)
    kv_heads = own_kv_heads(k.shape[2], ways)
    own_q, own_k, own_v = torch.split(_packed_heads(q, k, v, group), [q.shape[2] // ways, kv_heads, kv_heads], dim=2)
    return own_q, own_k, own_v


@torch.library.custom_op("meshwright::heads_for_tokens", mutates_args=())
def _packed_heads(q: Tensor, k: Tensor, v: Tensor, group: str) -> Tensor:
    """q (B, n, H, K), k and v (B, n, G, K) -> (B, U * n, h + 2 g, K): queries, keys and values of own heads."""
    ways = size_of(group)
    parts = [_by_rank(each, ways) for each in (q, k, v)]
    leaving = torch.cat(parts, dim=3)
    return _joined_tokens(_exchanged(leaving, group))


@torch.library.custom_op("meshwright::tokens_for_heads", mutates_args=())
def tokens_for_heads(y: Tensor, group: str) -> Tensor:
    """(B, U * n, h, K) -> (B, n, H, K). All-to-all over `group`, forward and backward."""
    arriving = _exchanged(_cut_tokens(y, size_of(group)), group)
    return arriving.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()


@torch.library.custom_op("meshwright::heads_for_tokens_backward", mutates_args=())
def _heads_back(g: Tensor, heads: int, kv_heads: int, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """(B, U * n, h + 2 g, K) -> gradients (B, n, H, K), (B, n, G, K) and again."""
    ways = size_of(group)
    own, own_kv = heads // ways, own_kv_heads(kv_heads, ways)
    arriving = _exchanged(_cut_tokens(g, ways), group)
    of_q, of_k, of_v = torch.split(arriving.permute(1, 2, 0, 3, 4), [own, own_kv, own_kv], dim=3)
    return of_q.flatten(2, 3).contiguous(), _summed(of_k, kv_heads), _summed(of_v, kv_heads)


@torch.library.custom_op("meshwright::tokens_for_heads_backward", mutates_args=())
def _tokens_back(g: Tensor, group: str) -> Tensor:
    """(B, n, H, K) -> (B, U * n, h, K)."""
    return _joined_tokens(_exchanged(_by_rank(g, size_of(group)).contiguous(), group))


def _by_rank(x: Tensor, ways: int) -> Tensor:
    """(B, n, H, K) -> (U, B, n, h, K): heads by the rank that works on them, a head once for each rank that does."""
    copies = max(ways // x.shape[2], 1)
    repeated = x[:, :, :, None].expand(-1, -1, -1, copies, -1).flatten(2, 3) if copies > 1 else x
    return torch.unflatten(repeated, 2, (ways, -1)).permute(2, 0, 1, 3, 4)


def _cut_tokens(x: Tensor, ways: int) -> Tensor:
    """(B, U * n, h, K) -> (U, B, n, h, K), contiguous."""
    return torch.unflatten(x, 1, (ways, -1)).transpose(0, 1).contiguous()


def _joined_tokens(x: Tensor) -> Tensor:
    """(U, B, n, h, K) -> (B, U * n, h, K)."""
    return x.transpose(0, 1).flatten(1, 2)


def _summed(x: Tensor, kv_heads: int) -> Tensor:
    """(B, n, U, g, K) -> (B, n, G, K), the sum where several ranks worked on one head."""
    heads = x.flatten(2, 3)
    copies = heads.shape[2] // kv_heads
    return torch.unflatten(heads, 2, (kv_heads, copies)).sum(3) if copies > 1 else heads.contiguous()


def _exchanged(leaving: Tensor, group: str) -> Tensor:
    """Run r of dim 0 for rank r -> run r from rank r."""
    over = lookup(group)
    arriving = torch.empty_like(leaving)
    finish(over, operations.all_to_all(over, arriving, leaving, (), (), over.ledger.phase))
    return arriving


@_packed_heads.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, group: str) -> Tensor:
    ways = size_of(group)
    heads = q.shape[2] // ways + 2 * own_kv_heads(k.shape[2], ways)
    return q.new_empty(q.shape[0], q.shape[1] * ways, heads, q.shape[3])


@tokens_for_heads.register_fake
def _(y: Tensor, group: str) -> Tensor:
    ways = size_of(group)
    return y.new_empty(y.shape[0], y.shape[1] // ways, y.shape[2] * ways, y.shape[3])


@_heads_back.register_fake
def _(g: Tensor, heads: int, kv_heads: int, group: str) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, width = g.shape[0], g.shape[1] // size_of(group), g.shape[3]
    of_k, of_v = (g.new_empty(batch, tokens, kv_heads, width) for _ in range(2))
    return g.new_empty(batch, tokens, heads, width), of_k, of_v


@_tokens_back.register_fake
def _(g: Tensor, group: str) -> Tensor:
    ways = size_of(group)
    return g.new_empty(g.shape[0], g.shape[1] * ways, g.shape[2] // ways, g.shape[3])


def _keep_heads(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, _, ctx.group = inputs
    ctx.heads, ctx.kv_heads = q.shape[2], k.shape[2]


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[-1]


_packed_heads.register_autograd(
    lambda ctx, g: (*_heads_back(g, ctx.heads, ctx.kv_heads, ctx.group), None), setup_context=_keep_heads
)
tokens_for_heads.register_autograd(lambda ctx, g: (_tokens_back(g, ctx.group), None), setup_context=_keep_group)
