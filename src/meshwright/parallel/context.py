"""Context parallelism, executed: the attention core of every block, replaced; nothing else of a unit sees the axis.

    q k v of own tokens -> [heads for tokens] -> blocks of the ring, or of all that was gathered -> [tokens for heads]

Which tokens those are, and every collective below, is declared in `plan.strategies.context`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.comm import conjugate
from meshwright.config.choices import Context
from meshwright.layout.groups import GroupName
from meshwright.model.attention import Attention, attend
from meshwright.model.rows import Sight
from meshwright.parallel.context_blocks import gathered_attention, ring_attention
from meshwright.parallel.context_heads import heads_for_tokens, tokens_for_heads
from meshwright.plan.plan import Plan
from meshwright.plan.strategies.context import ring_ways, ulysses_ways

__all__ = ["ContextAxis", "apply_context", "context_axis"]


@dataclass(frozen=True, slots=True)
class ContextAxis:
    """The registered names of a rank's groups on the context axis; empty where it is alone in one, or has none.

    ring      keys and values come round        gather    all of them at once        ulysses    heads for tokens
    """

    ring: str = ""
    gather: str = ""
    ulysses: str = ""

    def core(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, sight: Sight) -> Tensor:
        """`model.attention.Core`, for the tokens held: (B, S/C, H, K) -> the same shape."""
        if not self.ulysses:
            return self._blocks(q_BSHK, k_BSGK, v_BSGK, sight)
        q, k, v = heads_for_tokens(q_BSHK, k_BSGK, v_BSGK, self.ulysses)
        y = self._blocks(q.contiguous(), k, v, sight) if self.ring else attend(q, k, v, sight)
        out: Tensor = tokens_for_heads(y, self.ulysses)
        return out

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
        kv = torch.stack((k, v))
        if self.ring:
            y, _ = ring_attention(q, kv, sight.mask, sight.blocks, self.ring)
        else:
            everything = conjugate.gathered(kv, self.gather)
            y, _ = gathered_attention(q, everything, sight.mask, sight.blocks, self.gather)
        out: Tensor = y
        return out


def context_axis(plan: Plan, named: Callable[[GroupName], str]) -> ContextAxis:
    """The context axis of `plan`; `named` makes a group of this rank known by name."""
    if plan.context.kind is Context.ALLGATHER:
        return ContextAxis(gather=named(GroupName.CP))
    return ContextAxis(
        ring=named(GroupName.RING) if ring_ways(plan) > 1 else "",
        ulysses=named(GroupName.ULYSSES) if ulysses_ways(plan.degrees.cp, plan.context) > 1 else "",
    )


def apply_context(units: Iterable[nn.Module], axis: ContextAxis) -> None:
    """Replace the core of every attention of these units, in place, once. A second application raises ValueError."""
    for unit in units:
        for module in unit.modules():
            if isinstance(module, Attention):
                if module.core is not attend:
                    raise ValueError("the core of this attention has been replaced already")
                module.core = axis.core
