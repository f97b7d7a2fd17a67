"""What a plan decides of the memory of a unit's run, in the words of `arch/activations.py`."""

from __future__ import annotations

from dataclasses import replace

from meshwright.arch.activations import Crossing, Setting
from meshwright.arch.arch import Arch, Norm
from meshwright.config.choices import Context, Documents, Recompute
from meshwright.layout.axes import Coordinates
from meshwright.plan.folds.traffic import Transport
from meshwright.plan.plan import Plan
from meshwright.plan.strategies.context import ring_place, ring_ways, ulysses_ways

__all__ = ["narrowed", "setting_of"]


def setting_of(plan: Plan, at: Coordinates, transport: Transport, fused_norms: bool, threads: int = 0) -> Setting:
    """Of one micro-batch on the rank at `at`; `fused_norms` and `threads` as in `memory`."""
    return Setting(
        plan.batch.micro,
        plan.data.sequence_length // plan.degrees.cp,
        masked=plan.data.documents is Documents.MASKED,
        fused_norms=fused_norms or (plan.arch.norm is Norm.RMS and not plan.execution.compile),
        selective=plan.execution.recompute is Recompute.SELECTIVE,
        gathers=plan.execution.sequence,
        ways=plan.degrees.tp,
        rings=plan.execution.asynchronous_tensor,
        direct=transport is Transport.DIRECT,
        threads=threads,
        crossing=_crossing(plan, at) if plan.degrees.cp > 1 else None,
    )


def narrowed(arch: Arch, tp: int) -> Arch:
    """The model that one tensor rank runs: fewer heads, a narrower feed-forward, a part of the vocabulary."""
    if tp == 1:
        return arch
    kv_heads = max(arch.kv_heads // tp, 1)
    experts = replace(arch.experts, ffn=arch.experts.ffn // tp) if arch.experts is not None else None
    vocab = -(-arch.vocab // tp)
    return replace(arch, heads=arch.heads // tp, kv_heads=kv_heads, ffn=arch.ffn // tp, vocab=vocab, experts=experts)


def _crossing(plan: Plan, at: Coordinates) -> Crossing:
    gathered = plan.context.kind is Context.ALLGATHER
    return Crossing(ring_ways(plan), ulysses_ways(plan.degrees, plan.context), gathered, ring_place(plan, at))
