"""What a plan decides of the memory of a unit's run, in the words of `arch/activations.py`."""

from __future__ import annotations

from dataclasses import replace

from meshwright.arch.activations import Crossing, Setting
from meshwright.arch.arch import Arch, Norm
from meshwright.arch.heads import own_kv_heads
from meshwright.config.choices import Context, Documents, Recompute
from meshwright.layout.axes import Coordinates
from meshwright.plan.folds.traffic import Transport
from meshwright.plan.plan import ContextSplit, Plan
from meshwright.plan.strategies.context import ring_place, ulysses_ways

__all__ = ["crossing", "narrowed", "setting_of"]


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
        crossing=crossing(plan.degrees.cp, plan.context, ring_place(plan, at)),
    )


def narrowed(arch: Arch, tp: int) -> Arch:
    """The model that one tensor rank runs: fewer heads, a narrower feed-forward, a part of the vocabulary."""
    if tp == 1:
        return arch
    kv_heads = own_kv_heads(arch.kv_heads, tp)
    experts = replace(arch.experts, ffn=arch.experts.ffn // tp) if arch.experts is not None else None
    vocab = -(-arch.vocab // tp)
    return replace(arch, heads=arch.heads // tp, kv_heads=kv_heads, ffn=arch.ffn // tp, vocab=vocab, experts=experts)


def crossing(cp: int, split: ContextSplit, place: int = -1) -> Crossing | None:
    """How attention crosses a context axis of `cp` ranks; None without one.

    `place`: the part of a sequence that is worked on, counted from the end where it is negative. The last one holds
    most: all its queries see keys of every other.
    """
    if cp == 1:
        return None
    ulysses = ulysses_ways(cp, split)
    ring = cp // ulysses
    return Crossing(ring, ulysses, split.kind is Context.ALLGATHER, place % ring)
