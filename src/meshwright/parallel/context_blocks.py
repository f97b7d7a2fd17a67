"""Attention over the blocks of a ring: keys and values of all coordinates, one block at a time, as custom operations.

    ring of 3, rank 1    step 0             step 1             step 2
    forward              kv1, own block     kv0               kv2               of softmax merged as they come
                         kv1 -> 2           kv0 -> 2
    backward             kv1, d1            kv0, d0 -> 2      kv2 + d2 -> 2     and at last d1 comes home from 0
                         kv1 -> 2           kv0 -> 2

A hop is launched before the block at hand is worked on, so at most two blocks of others exist at a time, and in
backward as many of their gradients: one leaves, one arrives. Those start at their owner's successor and go round with
the block: ring - 1 hops each. Masked work is left out, hops never are.

Two hops are under way at once in backward. All ranks launch them in one order, that of the steps, keys and values
before gradients; messages between two ranks are matched in it, by gloo and by NCCL's one stream of a communicator.

    B  sequences    Q  tokens of a ring coordinate    H  query heads, G of keys    K  elements of a head    R  ring

Where all keys were gathered instead, the same blocks are met without a hop.
Source: Liu et al. 2023, arXiv:2310.01889; heads and tails as in Brandon et al. 2023, arXiv:2311.09431.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import operations
from meshwright.comm.communicator import Communicator
from meshwright.comm.custom import finish
from meshwright.comm.registry import lookup
from meshwright.layout.blocks import Sees, block_of
from meshwright.parallel.context_kernels import attend_block, block_gradients, merge_
from meshwright.plan.operation import Operation

__all__ = ["gathered_attention", "ring_attention"]

_Meet = Callable[[int, Tensor], None]
"""Works on the block (2, B, Q, G, K), keys and values, of one ring coordinate."""


class _View:
    """What of a block the queries see: the slices that `layout.blocks` decided."""

    def __init__(self, numbers: Sequence[int], mask: Tensor | None, source: int, size: int) -> None:
        block = block_of(numbers, source)
        self.seen, self.causal = block.sees is not Sees.NOTHING, block.sees is Sees.CAUSAL
        self.queries, self.keys = slice(*block.queries), slice(*block.keys)
        self.mask: Tensor | None = None
        if block.sees is Sees.MASKED:
            assert mask is not None
            self.mask = mask[..., self.queries, source * size : (source + 1) * size][..., self.keys]


class _Merged:
    """The output so far, in at least float32: the first block met must be the queries' own, which all see."""

    def __init__(self, q: Tensor, mask: Tensor | None, numbers: Sequence[int]) -> None:
        self._q, self._mask, self._numbers = q, mask, numbers
        self._out: Tensor | None = None
        self._log_sum: Tensor | None = None

    def meet(self, source: int, block: Tensor) -> None:
        view = _View(self._numbers, self._mask, source, block.shape[2])
        if not view.seen:
            return
        k, v = block[:, :, view.keys].unbind()
        out, log_sum = attend_block(self._q[:, view.queries], k, v, view.mask, view.causal)
        if self._out is None or self._log_sum is None:
            dtype = torch.promote_types(out.dtype, torch.float32)
            self._out, self._log_sum = out.to(dtype).contiguous(), log_sum
        else:
            merge_(self._out[:, view.queries], self._log_sum[:, :, view.queries], out, log_sum)

    def end(self) -> tuple[Tensor, Tensor]:
        """(B, Q, H, K) in the queries' dtype, (B, H, Q)."""
        assert self._out is not None
        assert self._log_sum is not None
        return self._out.to(self._q.dtype), self._log_sum.contiguous()


class _Gradients:
    """The gradient of the queries so far, in at least float32, and those of a block at a time."""

    def __init__(
        self, g: Tensor, q: Tensor, out: Tensor, log_sum: Tensor, mask: Tensor | None, numbers: Sequence[int]
    ) -> None:
        self._g, self._q, self._out, self._log_sum = g, q, out, log_sum
        self._mask, self._numbers = mask, numbers
        self._of_q: Tensor | None = None

    def of_block(self, source: int, block: Tensor) -> Callable[[Tensor], None]:
        """Work on a block; calling the result adds its gradients to a tensor of its shape."""
        view = _View(self._numbers, self._mask, source, block.shape[2])
        if not view.seen:
            return lambda _: None
        (k, v), rows = block[:, :, view.keys].unbind(), view.queries
        g, q, out, log_sum = self._g[:, rows], self._q[:, rows], self._out[:, rows], self._log_sum[:, :, rows]
        of_q, of_k, of_v = block_gradients(g, q, k, v, out, log_sum, view.mask, view.causal)
        if self._of_q is None:
            self._of_q = of_q.to(torch.promote_types(of_q.dtype, torch.float32)).contiguous()
        else:
            self._of_q[:, rows] += of_q

        def add(to: Tensor) -> None:
            to[0, :, view.keys] += of_k
            to[1, :, view.keys] += of_v

        return add

    def end(self) -> Tensor:
        """(B, Q, H, K) in the queries' dtype."""
        assert self._of_q is not None
        return self._of_q.to(self._q.dtype)


def _send_on(over: Communicator, outgoing: Tensor, arriving: Tensor) -> operations.Handle:
    """One hop of the ring, counted as the message that it is."""
    operations.count(over, Operation.SEND, over.ledger.phase, outgoing.numel() * outgoing.element_size())
    return operations.hop(over, outgoing, arriving)


def _go_round(over: Communicator, block: Tensor, meet: _Meet) -> None:
    """`meet` the block of every coordinate, own first, then those before it one by one."""
    for step in range(over.size):
        source = (over.place - step) % over.size
        if step == over.size - 1:
            meet(source, block)
            return
        coming = torch.empty_like(block)
        under_way = _send_on(over, block, coming)
        meet(source, block)
        finish(over, under_way)
        block = coming


@torch.library.custom_op("meshwright::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor, kv: Tensor, mask: Tensor | None, blocks: Sequence[int], group: str
) -> tuple[Tensor, Tensor]:
    """q (B, Q, H, K), kv (2, B, Q, G, K) contiguous, mask (B or 1, 1, Q, R * Q) -> (B, Q, H, K), (B, H, Q).

    Forward R - 1 hops of kv over `group`; backward as many, and as many of its gradient.
    """
    merged = _Merged(q, mask, blocks)
    _go_round(lookup(group), kv, merged.meet)
    return merged.end()


@torch.library.custom_op("meshwright::ring_attention_backward", mutates_args=())
def _ring_backward(
    g: Tensor, q: Tensor, kv: Tensor, out: Tensor, log_sum: Tensor, mask: Tensor | None, blocks: Sequence[int],
    group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    over, gradients = lookup(group), _Gradients(g, q, out, log_sum, mask, blocks)
    own = torch.zeros_like(kv)
    coming: Tensor | None = None
    under_way: operations.Handle | None = None

    def meet(source: int, block: Tensor) -> None:
        nonlocal coming, under_way
        add = gradients.of_block(source, block)
        if source == over.place:
            add(own)
            return
        if under_way is not None:
            finish(over, under_way)
        leaving = torch.zeros_like(kv) if coming is None else coming
        add(leaving)
        coming = torch.empty_like(kv)
        under_way = _send_on(over, leaving, coming)

    _go_round(over, kv, meet)
    if under_way is not None and coming is not None:
        finish(over, under_way)
        own += coming
    return gradients.end(), own


@torch.library.custom_op("meshwright::gathered_attention", mutates_args=())
def gathered_attention(
    q: Tensor, kv: Tensor, mask: Tensor | None, blocks: Sequence[int], group: str
) -> tuple[Tensor, Tensor]:
    """q (B, Q, H, K), kv (2 * R, B, Q, G, K) of all coordinates, mask (B or 1, 1, Q, R * Q) -> (B, Q, H, K), (B, H, Q).

    Sends nothing; `group` tells which block is the queries' own.
    """
    merged, over = _Merged(q, mask, blocks), lookup(group)
    for source, block in _own_first(over, kv):
        merged.meet(source, block)
    return merged.end()


@torch.library.custom_op("meshwright::gathered_attention_backward", mutates_args=())
def _gathered_backward(
    g: Tensor, q: Tensor, kv: Tensor, out: Tensor, log_sum: Tensor, mask: Tensor | None, blocks: Sequence[int],
    group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    gradients, over = _Gradients(g, q, out, log_sum, mask, blocks), lookup(group)
    of_kv = torch.zeros_like(kv)
    for (source, block), (_, of_block) in zip(_own_first(over, kv), _own_first(over, of_kv), strict=True):
        gradients.of_block(source, block)(of_block)
    return gradients.end(), of_kv


def _own_first(over: Communicator, kv: Tensor) -> list[tuple[int, Tensor]]:
    blocks = torch.unflatten(kv, 0, (over.size, 2)).unbind()
    return [((over.place - step) % over.size, blocks[(over.place - step) % over.size]) for step in range(over.size)]


def _fake(q: Tensor, kv: Tensor, mask: Tensor | None, blocks: Sequence[int], group: str) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    log_sum = q.new_empty(batch, heads, tokens, dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), log_sum


def _fake_backward(g: Tensor, q: Tensor, kv: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, kv, mask, ctx.blocks, ctx.group = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, kv, *output, mask)


def _backward_by(operation: Any) -> Callable[..., tuple[Tensor | None, ...]]:
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        of_q, of_kv = operation(g, *ctx.saved_tensors, ctx.blocks, ctx.group)
        return of_q, of_kv, None, None, None

    return backward


for _forward, _backward in ((ring_attention, _ring_backward), (gathered_attention, _gathered_backward)):
    _forward.register_fake(_fake)
    _backward.register_fake(_fake_backward)
    _forward.register_autograd(_backward_by(_backward), setup_context=_keep)
