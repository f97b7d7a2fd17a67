"""A faithful twin of a run that is too large to be trained ten steps a rung on this machine.

Kept: the family with all its switches, tied embeddings, query heads a key/value head, whether key/value heads divide
over the tensor ranks, whether the vocabulary does (padding stays real), every axis and feature, rings of groups, at
least one block a stage, uneven stages, several micro-batches, windows shorter than the sequence. Made small: everything
else.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.arch.arch import Arch, Experts
from meshwright.arch.heads import kv_heads_divide, own_kv_heads
from meshwright.arch.parameters import tensors
from meshwright.layout.axes import Axis, Degrees
from meshwright.plan.plan import Batch, ContextSplit, Plan, Sharding
from meshwright.plan.rules import canonical
from meshwright.plan.strategies.context import ulysses_ways
from meshwright.verify.settings import OPTIMIZERS, STEPS

__all__ = ["MOST_RANKS", "twin", "work_flops"]

MOST_RANKS = 8
_MOST_FLOPS = 2e10  # of a rung: seconds in float64 on one core
_HEAD_DIM, _VOCAB, _SEQUENCE, _MICRO, _ACCUMULATION = 16, 193, 32, 2, 3


def twin(plan: Plan, most_ranks: int = MOST_RANKS) -> tuple[Plan, str]:
    """A plan small enough to verify, and what was made smaller; the plan itself and "" where it is small enough.

    It has at most `most_ranks` ranks, unless so many axes are in use that each of them at its least needs more.
    """
    if work_flops(plan) <= _MOST_FLOPS and plan.degrees.ranks <= most_ranks:
        return plan, ""
    degrees = _degrees(plan, most_ranks)
    stages = _stages(plan, degrees)
    context, sequence = _context(plan, degrees), _sequence(plan, degrees)
    arch = _arch(plan, degrees, ulysses_ways(degrees.cp, context), sum(stages), sequence)
    micro = min(plan.batch.micro, _MICRO)
    accumulation = min(plan.accumulation, _ACCUMULATION)
    small = replace(
        plan,
        arch=arch,
        degrees=degrees,
        data=replace(plan.data, sequence_length=sequence),
        batch=Batch(micro * accumulation * degrees.dp * degrees.ep, micro),
        pipeline=replace(plan.pipeline, stages=stages),
        sharding=_sharding(plan, degrees),
        context=context,
    )
    return canonical(small), _told(plan, small)


def work_flops(plan: Plan) -> float:
    """What training the plan's model for one rung takes: 6 FLOPs a parameter and token, both optimizers."""
    parameters = sum(tensor.numel for tensor in tensors(plan.arch))
    return 6.0 * parameters * plan.batch.sequences * plan.data.sequence_length * STEPS * len(OPTIMIZERS)


def _degrees(plan: Plan, most_ranks: int) -> Degrees:
    """Divide the largest degree by its smallest prime until few enough ranks are left; none falls to 1.

    Sharding inside smaller groups needs four replicas, a ring of groups four context ranks: two groups of two.
    """
    ways = {axis: plan.degrees.on(axis) for axis in Axis}
    floor = dict.fromkeys(Axis, 2)
    if plan.sharding.within and ways[Axis.DP] % 4 == 0:
        floor[Axis.DP] = 4
    if plan.context.inner > 1:
        floor[Axis.CP] = 4
    while math.prod(ways.values()) > most_ranks:
        wide = [axis for axis in Axis if ways[axis] > floor[axis]]
        if not wide:
            break
        axis = max(wide, key=lambda each: ways[each])
        prime = next(p for p in range(2, ways[axis] + 1) if ways[axis] % p == 0)
        ways[axis] = max(ways[axis] // prime, floor[axis])
    return Degrees(**{axis.value: size for axis, size in ways.items()}, order=plan.degrees.order)


def _context(plan: Plan, degrees: Degrees) -> ContextSplit:
    """A ring of groups stays one: the groups as they are where they fit, else the smallest."""
    inner, cp = plan.context.inner, degrees.cp
    if inner > 1 and (cp % inner or cp == inner):
        inner = next(size for size in range(2, cp) if cp % size == 0)
    return replace(plan.context, inner=inner)


def _sequence(plan: Plan, degrees: Degrees) -> int:
    """Tokens that every cut of the twin divides."""
    length, step = plan.data.sequence_length, 2 * degrees.cp * degrees.tp
    if degrees.cp > 1 and length % step:
        length = max(length // step * step, step)
    return min(length, _up(_SEQUENCE, step))


def _stages(plan: Plan, degrees: Degrees) -> tuple[int, ...]:
    """As many virtual stages as the twin has, of one block; where the run's are uneven, the first has two."""
    given, count = plan.pipeline.stages, degrees.pp * plan.pipeline.chunks
    uneven = len(set(given)) > 1
    blocks = [1] * count
    if uneven or count == 1:
        blocks[0] = min(2, plan.arch.layers)
    return tuple(blocks)


def _sharding(plan: Plan, degrees: Degrees) -> Sharding:
    replicas, within = degrees.dp * degrees.ep * degrees.cp, plan.sharding.within
    if within and (replicas % within or replicas == within):
        within = next((size for size in range(2, replicas) if replicas % size == 0), 1)
    return replace(plan.sharding, within=within, bucket_bytes=min(plan.sharding.bucket_bytes, 16384))


def _arch(plan: Plan, degrees: Degrees, ulysses: int, layers: int, sequence: int) -> Arch:
    arch, tp = plan.arch, degrees.tp
    group = arch.heads // arch.kv_heads
    kv_heads = tp * ulysses if arch.kv_heads % plan.degrees.tp == 0 else max(tp // 2, 1)
    kv_heads = min(max(kv_heads, 2 if arch.kv_heads > 1 else 1), arch.kv_heads)
    if not kv_heads_divide(own_kv_heads(kv_heads, tp), ulysses):  # one of them serves whatever number of ranks
        kv_heads = tp
    heads = kv_heads * group
    head_dim = min(arch.head_dim, _HEAD_DIM)
    hidden = max(round(heads * head_dim * arch.hidden / (arch.heads * arch.head_dim)), 1)
    hidden = min(_up(hidden, tp), arch.hidden)
    return replace(
        arch,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=min(_up(max(hidden * arch.ffn // arch.hidden, 8), tp), arch.ffn),
        vocab=min(arch.vocab, _alike(_VOCAB, arch.vocab, plan.degrees.tp, tp)),
        max_positions=max(sequence, min(arch.max_positions, 2 * sequence)) if arch.max_positions else 0,
        sliding_window=-(-arch.sliding_window * sequence // plan.data.sequence_length),
        windowed_layers=tuple(layer for layer in arch.windowed_layers if layer < layers),
        experts=_experts(arch.experts, degrees, layers) if arch.experts else None,
    )


def _experts(experts: Experts, degrees: Degrees, layers: int) -> Experts:
    count = min(experts.count, _up(max(4, experts.active), degrees.ep))
    return replace(
        experts,
        count=count,
        active=min(experts.active, count),
        ffn=min(experts.ffn, _up(32, degrees.tp)),
        dense_layers=min(experts.dense_layers, layers - 1),
    )


def _alike(least: int, size: int, ways: int, twin_ways: int) -> int:
    """A size from `least` on that divides over the twin's ranks exactly if `size` divides over the run's."""
    divides = size % ways == 0
    return next(n for n in range(least, least + 2 * twin_ways + 2) if (n % twin_ways == 0) is divides or twin_ways == 1)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _told(plan: Plan, small: Plan) -> str:
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
    changes = [(name, getattr(plan.arch, name), getattr(small.arch, name)) for name in sizes]
    changes += [(axis.value, plan.degrees.on(axis), small.degrees.on(axis)) for axis in Axis]
    changes += [
        ("sequence_length", plan.data.sequence_length, small.data.sequence_length),
        ("batch.global", plan.batch.sequences, small.batch.sequences),
        ("batch.micro", plan.batch.micro, small.batch.micro),
    ]
    told = ", ".join(f"{name} {before} -> {after}" for name, before, after in changes if before != after)
    return f"a scaled-down twin is verified: {told}"
