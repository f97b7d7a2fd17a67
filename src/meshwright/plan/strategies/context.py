"""The context axis, declared: which sequences can be cut over it, and how attention may meet them again."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.arch.arch import Arch
from meshwright.config.choices import Context
from meshwright.config.divisors import nearest_divisors
from meshwright.config.errors import RequestError
from meshwright.plan.plan import ContextSplit, Plan

__all__ = ["length_rule", "problems", "split_rule"]


def length_rule(length: int, cp: int) -> str | None:
    """What a sequence of `length` tokens breaks on `cp` ranks; None where it can be cut."""
    return f"cp must divide the sequence length of {length}" if length % cp else None


def split_rule(arch: Arch, length: int, tp: int, cp: int, split: ContextSplit) -> str | None:
    """What a way to exchange keys and values breaks: a balanced ring gives each rank an early and a late part; over
    Ulysses' ranks heads are cut once more."""
    if cp == 1:
        return None
    ways = cp if split.kind is Context.ULYSSES else split.inner
    own, kv_heads = arch.heads // tp, max(arch.kv_heads // tp, 1)
    if cp % split.inner:
        return f"context_inner must divide cp = {cp}"
    if split.kind is Context.RING and length % (2 * cp):
        return f"2 cp must divide the sequence length of {length} for a balanced ring"
    if ways > 1 and own % ways:
        return f"ulysses must divide the {arch.heads} query heads / tp"
    if ways > 1 and kv_heads % ways and ways % kv_heads:
        return f"ulysses must divide the {arch.kv_heads} key/value heads / tp, or be a multiple"
    return None


def problems(plan: Plan) -> Iterator[RequestError]:
    """Every rule of the context axis that `plan` breaks."""
    cp, length = plan.degrees.cp, plan.data.sequence_length
    if cp == 1 or length < 1:
        return
    rule = length_rule(length, cp)
    if rule:
        works = [f"mesh.cp = {size}" for size in nearest_divisors(length, cp)]
        yield RequestError(f"mesh.cp = {cp}", rule, works)
        return
    rule = split_rule(plan.arch, length, plan.degrees.tp, cp, plan.context)
    if rule:
        told = f'parallel.context = "{plan.context.kind.value}" with mesh.cp = {cp}'
        inner = f", parallel.context_inner = {plan.context.inner}" if plan.context.inner > 1 else ""
        yield RequestError(told + inner, rule, ('parallel.context = "allgather"', "another mesh.cp"))
