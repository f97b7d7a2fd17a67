"""The logical tensors of a decoder, in order of execution.

One list feeds ownership, initialisation, checkpoints, parity and prices; the plain model registers exactly these names.

    embedding        weight [positions] [norm]
    layers.<i>       attention_norm   attention.{query key value [query_norm key_norm] output}
                     mlp_norm         mlp.{[gate] up down}
                                or    mlp.router  mlp.experts.{gate up down}  [mlp.shared.{gate up down}]
    head             norm [weight]    a tied head reads embedding.weight instead of owning one
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from meshwright.arch.arch import Arch, Experts, Latent, Norm
from meshwright.arch.tensors import Init, LogicalAxis, Tensor, UnitKind

_STD = 0.02  # GPT-2's published initialisation, and most models' since
_NORMAL = Init(std=_STD)

_Dim = tuple[int, LogicalAxis]


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor before it is placed: `path` is relative to its unit."""

    path: str
    dims: tuple[_Dim, ...]
    init: Init = _NORMAL


@lru_cache(maxsize=32)
def tensors(arch: Arch) -> tuple[Tensor, ...]:
    """All logical tensors of `arch`, in order of execution: embedding, blocks, head."""
    return tuple(tensor for unit in range(arch.num_units) for tensor in _unit_tensors(arch, unit))


def unit_tensors(arch: Arch, unit: int) -> tuple[Tensor, ...]:
    """The logical tensors that `unit` owns (a tied head owns no projection: `Tensor.readers` says who reads it)."""
    return tuple(_unit_tensors(arch, unit))


def _unit_tensors(arch: Arch, unit: int) -> Iterator[Tensor]:
    prefix = arch.unit_name(unit)
    for part in _parts(arch, unit):
        name = f"{prefix}.{part.path}"
        tied = arch.tie_embeddings and name == "embedding.weight"
        yield Tensor(
            name=name,
            shape=tuple(size for size, _ in part.dims),
            axes=tuple(axis for _, axis in part.dims),
            init=part.init,
            unit=unit,
            readers=(unit, arch.head_unit) if tied else (unit,),
        )


def _parts(arch: Arch, unit: int) -> Iterator[_Part]:
    match arch.unit_kind(unit):
        case UnitKind.EMBEDDING:
            yield from _embedding(arch)
        case UnitKind.BLOCK:
            yield from _block(arch, layer=unit - 1)
        case UnitKind.HEAD:
            yield from _head(arch)


def _embedding(arch: Arch) -> Iterator[_Part]:
    yield _Part("weight", ((arch.vocab, LogicalAxis.VOCABULARY), _hidden(arch)))
    if arch.rope is None and not arch.alibi:
        yield _Part("positions", ((arch.max_positions, LogicalAxis.POSITION), _hidden(arch)))
    if arch.embedding_norm:
        yield from _norm(arch, "norm")


def _head(arch: Arch) -> Iterator[_Part]:
    yield from _norm(arch, "norm")
    if not arch.tie_embeddings:
        yield _Part("weight", ((arch.vocab, LogicalAxis.VOCABULARY), _hidden(arch)))


def _block(arch: Arch, layer: int) -> Iterator[_Part]:
    yield from _norm(arch, "attention_norm")
    yield from _attention(arch) if arch.latent is None else _latent_attention(arch, arch.latent)
    yield from _norm(arch, "mlp_norm")
    if arch.experts is not None and arch.is_routed(layer):
        yield from _routed(arch, arch.experts)
    else:
        yield from _feed_forward(arch, "mlp", arch.ffn)


def _attention(arch: Arch) -> Iterator[_Part]:
    queries = (arch.heads * arch.head_dim, LogicalAxis.HEADS)
    keys = (arch.kv_heads * arch.head_dim, LogicalAxis.KV_HEADS)
    yield from _linear("attention.query", queries, _hidden(arch), arch.qkv_bias)
    yield from _linear("attention.key", keys, _hidden(arch), arch.qkv_bias)
    yield from _linear("attention.value", keys, _hidden(arch), arch.qkv_bias)
    if arch.qk_norm:
        yield _gain("attention.query_norm.weight", (arch.head_dim, LogicalAxis.HEAD_DIM))
        yield _gain("attention.key_norm.weight", (arch.head_dim, LogicalAxis.HEAD_DIM))
    yield from _linear("attention.output", _hidden(arch), queries, arch.output_bias, _residual(arch))


def _latent_attention(arch: Arch, latent: Latent) -> Iterator[_Part]:
    queries = (arch.heads * arch.head_dim, LogicalAxis.HEADS)
    query_latent = (latent.query_rank, LogicalAxis.LATENT)
    kv_latent = (latent.kv_rank, LogicalAxis.LATENT)
    if latent.query_rank:
        yield from _linear("attention.query_down", query_latent, _hidden(arch), arch.qkv_bias)
        yield _gain("attention.query_latent_norm.weight", query_latent)
        yield from _linear("attention.query_up", queries, query_latent)
    else:
        yield from _linear("attention.query", queries, _hidden(arch))
    compressed = (latent.kv_rank + latent.rope_dim, LogicalAxis.LATENT)
    expanded = (arch.heads * (latent.content_dim + latent.value_dim), LogicalAxis.HEADS)
    values = (arch.heads * latent.value_dim, LogicalAxis.HEADS)
    yield from _linear("attention.kv_down", compressed, _hidden(arch), arch.qkv_bias)
    yield _gain("attention.kv_latent_norm.weight", kv_latent)
    yield from _linear("attention.kv_up", expanded, kv_latent)
    yield from _linear("attention.output", _hidden(arch), values, arch.output_bias, _residual(arch))


def _feed_forward(arch: Arch, path: str, width: int) -> Iterator[_Part]:
    ffn = (width, LogicalAxis.FFN)
    if arch.gated:
        yield from _linear(f"{path}.gate", ffn, _hidden(arch), arch.mlp_bias)
    yield from _linear(f"{path}.up", ffn, _hidden(arch), arch.mlp_bias)
    yield from _linear(f"{path}.down", _hidden(arch), ffn, arch.mlp_bias, _residual(arch))


def _routed(arch: Arch, experts: Experts) -> Iterator[_Part]:
    count, ffn = (experts.count, LogicalAxis.EXPERTS), (experts.ffn, LogicalAxis.EXPERT_FFN)
    yield _Part("mlp.router.weight", ((experts.count, LogicalAxis.ROUTES), _hidden(arch)))
    if arch.gated:
        yield _Part("mlp.experts.gate", (count, ffn, _hidden(arch)))
    yield _Part("mlp.experts.up", (count, ffn, _hidden(arch)))
    yield _Part("mlp.experts.down", (count, _hidden(arch), ffn), _residual(arch))
    if experts.shared:
        yield from _feed_forward(arch, "mlp.shared", experts.shared * experts.ffn)


def _linear(path: str, outputs: _Dim, inputs: _Dim, bias: bool = False, init: Init = _NORMAL) -> Iterator[_Part]:
    yield _Part(f"{path}.weight", (outputs, inputs), init)
    if bias:
        yield _Part(f"{path}.bias", (outputs,), Init())


def _norm(arch: Arch, path: str) -> Iterator[_Part]:
    yield _gain(f"{path}.weight", _hidden(arch))
    if arch.norm is Norm.LAYER:
        yield _Part(f"{path}.bias", (_hidden(arch),), Init())


def _gain(path: str, dim: _Dim) -> _Part:
    return _Part(path, (dim,), Init(constant=1.0))


def _residual(arch: Arch) -> Init:
    """Projections into the residual stream start smaller: their variances add up over 2 x layers of them."""
    return Init(std=_STD / math.sqrt(2 * arch.layers))


def _hidden(arch: Arch) -> _Dim:
    return arch.hidden, LogicalAxis.HIDDEN
