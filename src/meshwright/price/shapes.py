"""A model as the price model sees it: the products of each kind of block, how the tensor axis cuts them, and widths.

Products that read the same input are one (query, key and value; gate and up), as stacks run them.

    column    its outputs are cut: n / tp      row    its inputs are: k / tp      whole    nobody cuts it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from meshwright.arch.arch import Arch
from meshwright.arch.arithmetic import Operation, OperationKind, operations


class Side(Enum):
    COLUMN = "column"
    ROW = "row"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Product:
    """(tokens, k) x (k, n). `kv`: how many of n are keys and values. `experts` > 1: rows are spread over so many."""

    n: int
    k: int
    side: Side
    kv: int = 0
    experts: int = 1
    latent: bool = False  # expands compressed queries, keys or values


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Blocks of one kind: `count` of them; `width` is the inner width a token meets, all its experts together."""

    count: int
    products: tuple[Product, ...]
    keys: float  # mean keys a query sees, diagonal half
    width: int
    routed: bool


@dataclass(frozen=True, slots=True)
class Shapes:
    blocks: tuple[BlockShape, ...]
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    score_dim: int
    value_dim: int
    gated: bool
    layers: int
    active: int  # experts a token chooses; 0: none
    experts: int
    alibi: bool
    tied: bool


_ROWS = ("attention.output", "mlp.down", "mlp.experts.down", "mlp.shared.down")
_WHOLE = ("attention.query_down", "attention.kv_down", "mlp.router")


@lru_cache(maxsize=256)
def shapes(arch: Arch, sequence: int) -> Shapes:
    """The shapes of `arch` on sequences of `sequence` tokens."""
    kinds: dict[tuple[bool, int], int] = {}
    for layer in range(arch.layers):
        kind = arch.is_routed(layer), min(arch.window(layer) or sequence, sequence)
        kinds[kind] = kinds.get(kind, 0) + 1
    first = {kind: layer for layer in reversed(range(arch.layers)) for kind in [_kind(arch, layer, sequence)]}
    return Shapes(
        blocks=tuple(_block(arch, first[kind], count, kind, sequence) for kind, count in kinds.items()),
        hidden=arch.hidden,
        vocab=arch.vocab,
        heads=arch.heads,
        kv_heads=arch.kv_heads,
        score_dim=arch.head_dim,
        value_dim=arch.value_dim,
        gated=arch.gated,
        layers=arch.layers,
        active=arch.experts.active if arch.experts else 0,
        experts=arch.experts.count if arch.experts else 0,
        alibi=arch.alibi,
        tied=arch.tie_embeddings,
    )


def _kind(arch: Arch, layer: int, sequence: int) -> tuple[bool, int]:
    return arch.is_routed(layer), min(arch.window(layer) or sequence, sequence)


def _block(arch: Arch, layer: int, count: int, kind: tuple[bool, int], sequence: int) -> BlockShape:
    routed, window = kind
    done = [each for each in operations(arch, layer + 1, sequence, sequence) if each.kind is OperationKind.MATMUL]
    width = arch.ffn
    if routed and arch.experts is not None:
        width = (arch.experts.active + arch.experts.shared) * arch.experts.ffn
    return BlockShape(count, tuple(_products(done)), window - window**2 / (2 * sequence), width, routed)


def _products(done: list[Operation]) -> Iterator[Product]:
    """Products with one input and one cut, joined."""
    joined: dict[tuple[str, int, Side, int], tuple[int, int]] = {}
    for each in done:
        side = Side.ROW if each.name in _ROWS else Side.WHOLE if each.name in _WHOLE else Side.COLUMN
        path = "expanded" if each.name in ("attention.query_up", "attention.kv_up") else each.name.rpartition(".")[0]
        key = path, each.k, side, each.groups
        n, kv = joined.get(key, (0, 0))
        own = each.n if each.name in ("attention.key", "attention.value") else 0
        joined[key] = n + each.n, kv + own
    for (name, k, side, groups), (n, kv) in joined.items():
        yield Product(n, k, side, kv, groups, latent=name == "expanded")
