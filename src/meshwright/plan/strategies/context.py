"""The context axis, declared: which tokens a rank holds, and how attention meets the others again.

    cp = ring x ulysses     ring, outermost: keys and values come round     ulysses: heads are exchanged for tokens

    kind            ring      ulysses    in a block forward            backward
    ring            cp        1          ring - 1 sends of k v         ring - 1 of k v, ring - 1 of their gradients
    ring, inner     cp / i    i          both: 2 all-to-alls around    the ring's sends
    ulysses         1         cp         all-to-all of q k v, of out   the same two back
    allgather       cp        1          one all-gather of k v         one reduce-scatter of their gradients

A ring coordinate holds the head and tail chunks of `layout.rows`, cut into equal runs for its ulysses ranks: once these
have met, each has all tokens of the coordinate, ascending, for heads of its own. Where an exchange finds fewer
key/value heads than ranks, a head goes to every rank whose queries it serves.

Sources: Liu et al. 2023, arXiv:2310.01889 (ring); Jacobs et al. 2023, arXiv:2309.14509 (ulysses); Fang and Zhao 2024,
arXiv:2405.07719 (both at once).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.arch.arch import Arch
from meshwright.arch.heads import kv_heads_divide, met_kv_heads, own_kv_heads
from meshwright.arch.tensors import UnitKind
from meshwright.config.choices import Context
from meshwright.config.divisors import nearest_divisors
from meshwright.config.errors import RequestError
from meshwright.layout.axes import Coordinates
from meshwright.layout.blocks import AttentionRows
from meshwright.layout.groups import GroupName
from meshwright.layout.rows import (
    Integers,
    Rows,
    contiguous_columns,
    head_tail_columns,
    head_tail_columns_by_document,
    part_of,
)
from meshwright.plan.action import Action, Op
from meshwright.plan.operation import Operation
from meshwright.plan.plan import ContextSplit, Plan
from meshwright.plan.strategies.call import Call
from meshwright.plan.strategies.tensor import micro_tokens

__all__ = [
    "attention_rows", "calls", "held_columns", "length_rule", "problems", "ring_columns", "ring_place", "ring_ways",
    "split_rule", "ulysses_ways",
]  # fmt: skip


def ulysses_ways(cp: int, split: ContextSplit) -> int:
    """Neighbours on a context axis of `cp` ranks that exchange heads for tokens."""
    match split.kind:
        case Context.RING:
            return split.inner
        case Context.ULYSSES:
            return cp
        case Context.ALLGATHER:
            return 1


def ring_ways(plan: Plan) -> int:
    """The parts of a sequence between which keys and values travel, or are gathered."""
    return plan.degrees.cp // ulysses_ways(plan.degrees.cp, plan.context)


def ring_place(plan: Plan, at: Coordinates) -> int:
    """Which of these parts a rank works on."""
    return at.cp // ulysses_ways(plan.degrees.cp, plan.context)


def ring_columns(plan: Plan, rows: Rows) -> Integers:
    """Whole sequences -> (R, S/R), or (R, B, S/R) where documents are masked: the tokens of every ring coordinate,
    ascending.

    Heads and tails, so that a causal mask leaves each the same work; runs where S is no multiple of 2 R.
    """
    ways, length = ring_ways(plan), rows.num_tokens
    if ways == 1 or length % (2 * ways):
        return contiguous_columns(length, ways)
    if rows.document_ids is None:
        return head_tail_columns(length, ways)
    return head_tail_columns_by_document(rows.document_ids, ways)


def held_columns(plan: Plan, at: Coordinates, rows: Rows) -> Integers:
    """Whole sequences -> (S/C,) or (B, S/C): the tokens that the rank at `at` holds, ascending."""
    ways = ulysses_ways(plan.degrees.cp, plan.context)
    columns = ring_columns(plan, rows)[ring_place(plan, at)]
    return np.ascontiguousarray(columns[..., part_of(columns.shape[-1], at.cp % ways, ways)])


def attention_rows(plan: Plan, at: Coordinates, rows: Rows) -> AttentionRows:
    """Whole sequences -> what the attention of the rank at `at` works on: for heads of its own all queries of its ring
    coordinate, and all keys."""
    columns, own = ring_columns(plan, rows), ring_place(plan, at)
    keys = np.concatenate(list(columns), axis=-1)
    return AttentionRows(rows.columns(columns[own]), rows.columns(keys), len(columns), own, plan.execution.compile)


def calls(plan: Plan, action: Action) -> Iterator[Call]:
    """What one compute action sends over the context axis: attention alone, and nothing of it is weight work."""
    if plan.degrees.cp == 1 or action.op is Op.WEIGHT or plan.arch.unit_kind(action.unit) is not UnitKind.BLOCK:
        return
    forward = action.op in (Op.FORWARD, Op.RECOMPUTE)
    ways = ulysses_ways(plan.degrees.cp, plan.context)
    heads = plan.arch.heads // plan.degrees.tp
    kv_heads = own_kv_heads(plan.arch.kv_heads, plan.degrees.tp)
    met = met_kv_heads(kv_heads, ways)
    tokens = micro_tokens(plan)
    width = plan.precision.sent_bytes
    query, value = plan.arch.head_dim * width, plan.arch.value_dim * width
    pair = query + value
    if ways > 1:
        out = Call(GroupName.ULYSSES, Operation.ALL_TO_ALL, tokens * heads * value)
        packed = Call(GroupName.ULYSSES, Operation.ALL_TO_ALL, tokens * (heads * query + met * pair))
        yield from (packed, out) if forward else (out, packed)
    if plan.context.kind is Context.ALLGATHER:
        operation = Operation.ALL_GATHER if forward else Operation.REDUCE_SCATTER
        yield Call(GroupName.CP, operation, plan.degrees.cp * tokens * kv_heads * pair)
    for _ in range((ring_ways(plan) - 1) * (1 if forward else 2) if plan.context.kind is Context.RING else 0):
        yield Call(GroupName.RING, Operation.SEND, tokens * met * pair)


def length_rule(length: int, cp: int) -> str | None:
    """What a sequence of `length` tokens breaks on `cp` ranks; None where it can be cut."""
    return f"cp must divide the sequence length of {length}" if length % cp else None


def split_rule(arch: Arch, length: int, tp: int, cp: int, split: ContextSplit) -> str | None:
    """What a way to exchange keys and values breaks: a balanced ring gives each rank an early and a late part; over
    Ulysses' ranks heads are cut once more."""
    if cp == 1:
        return None
    ways, own = ulysses_ways(cp, split), arch.heads // tp
    if cp % split.inner:
        return f"context_inner must divide cp = {cp}"
    if split.kind is Context.RING and length % (2 * cp):
        return f"2 cp must divide the sequence length of {length} for a balanced ring"
    if ways > 1 and own % ways:
        return f"ulysses must divide the {arch.heads} query heads / tp"
    if not kv_heads_divide(own_kv_heads(arch.kv_heads, tp), ways):
        return f"ulysses must divide the {arch.kv_heads} key/value heads / tp, or be a multiple"
    return None


def problems(plan: Plan) -> Iterator[RequestError]:
    """Every rule of the context axis that `plan` breaks."""
    cp, length = plan.degrees.cp, plan.data.sequence_length
    if cp == 1 or length < 1:
        return
    rule = length_rule(length, cp)
    if rule:
        yield RequestError(f"mesh.cp = {cp}", rule, _other_degrees(plan))
        return
    rule = split_rule(plan.arch, length, plan.degrees.tp, cp, plan.context)
    if rule:
        told = f'parallel.context = "{plan.context.kind.value}" with mesh.cp = {cp}'
        inner = f", parallel.context_inner = {plan.context.inner}" if plan.context.inner > 1 else ""
        yield RequestError(told + inner, rule, [*_other_splits(plan), *_other_degrees(plan)[:2]])


def _other_degrees(plan: Plan) -> list[str]:
    """The nearest degrees that cut the plan's sequences as it says."""
    length, tp = plan.data.sequence_length, plan.degrees.tp
    fits = nearest_divisors(
        length, plan.degrees.cp, lambda cp: split_rule(plan.arch, length, tp, cp, plan.context) is None
    )
    return [f"mesh.cp = {cp}" for cp in fits]


def _other_splits(plan: Plan) -> Iterator[str]:
    """What cuts the plan's sequences over as many ranks: the nearest inner group of a ring, then each other kind."""
    cp, inner = plan.degrees.cp, plan.context.inner

    def fits(kind: Context, inner: int = 1) -> bool:
        split = ContextSplit(kind, inner)
        return split_rule(plan.arch, plan.data.sequence_length, plan.degrees.tp, cp, split) is None

    if plan.context.kind is Context.RING and inner > 1:
        yield from (
            f"parallel.context_inner = {size}"
            for size in nearest_divisors(cp, inner, lambda size: fits(Context.RING, size))[:2]
        )
    alone = " with parallel.context_inner = 1" if inner > 1 else ""
    others = [kind for kind in Context if kind is not plan.context.kind and fits(kind)]
    yield from (f'parallel.context = "{kind.value}"{alone}' for kind in others)
