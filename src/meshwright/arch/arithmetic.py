"""The arithmetic of a decoder as data: what each unit multiplies, how much it moves, and what a token costs.

Conventions (one multiply-add is two floating-point operations; backward is twice the forward):

    model FLOPs of a token = 6 x active matmul parameters  (output head in, look-up out, chosen experts only)
                           + attention: 3 x 2 products x 2 x heads x head_dim x keys seen, per block

    keys seen per query, on average over a sequence of S tokens, with a window of w (w = S without one):
        CAUSAL   w - w^2 / 2S   (S / 2 without a window: the diagonal counts half)
        FULL     S              (what dense kernels without a mask would do)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import lru_cache

from meshwright.arch.arch import Arch, Experts, Latent, Norm
from meshwright.arch.parameters import tensors
from meshwright.arch.tensors import LogicalAxis, Tensor, UnitKind
from meshwright.config.choices import Recompute


class Convention(StrEnum):
    """How attention is counted in model FLOPs. Reports name it."""

    CAUSAL = "causal"
    FULL = "full"


class OperationKind(Enum):
    MATMUL = "matmul"
    ATTENTION = "attention"
    NORM = "norm"
    ELEMENTWISE = "elementwise"
    LOOKUP = "lookup"
    LOSS = "loss"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a unit's forward, whole (as one process would do it).

    MATMUL     (m, k) x (k, n); with `groups` > 1 the m rows are divided among `groups` weights of (k, n)
    ATTENTION  `groups` heads (over all sequences) of m queries on n keys of k elements, values of `values` elements,
               each query seeing at most `window` keys (n where nothing slides)
    others     only move: `read` and `written` elements of activations in forward
    `weight` is the elements of parameters read.
    """

    name: str
    kind: OperationKind
    m: int = 0
    n: int = 0
    k: int = 0
    groups: int = 1
    values: int = 0
    window: int = 0
    read: int = 0
    written: int = 0
    weight: int = 0

    def forward_flops(self, convention: Convention = Convention.CAUSAL) -> int:
        """Floating-point operations of the products of one forward; 0 for operations that only move."""
        match self.kind:
            case OperationKind.MATMUL:
                return 2 * self.m * self.n * self.k
            case OperationKind.ATTENTION:
                twice_keys = 2 * self.n * self.m
                if convention is Convention.CAUSAL:
                    twice_keys = 2 * self.window * self.m - self.window**2
                return self.groups * (self.k + self.values) * twice_keys
            case _:
                return 0

    def backward_flops(self, convention: Convention = Convention.CAUSAL) -> int:
        """Model FLOPs of its backward: one product for each operand's gradient."""
        return 2 * self.forward_flops(convention)


@lru_cache(maxsize=4096)
def operations(arch: Arch, unit: int, tokens: int, sequence: int) -> tuple[Operation, ...]:
    """What `unit` does in the forward of `tokens` tokens in sequences of `sequence`, in order of execution.

    Routed experts are counted for the routing everybody plans with: each token chooses `experts.active`, nothing is
    dropped. Raises ValueError if the tokens are not whole sequences.
    """
    if sequence < 1 or tokens % sequence:
        raise ValueError(f"{tokens} tokens are not whole sequences of {sequence}")
    match arch.unit_kind(unit):
        case UnitKind.EMBEDDING:
            return tuple(_embedding(arch, tokens))
        case UnitKind.BLOCK:
            return tuple(_block(arch, unit - 1, tokens, sequence))
        case UnitKind.HEAD:
            return tuple(_head(arch, tokens))


def parameters(arch: Arch) -> int:
    """All parameters, a tied embedding once."""
    return sum(tensor.numel for tensor in tensors(arch))


def active_parameters(arch: Arch) -> int:
    """The parameters one token touches: all but the experts it is not sent to."""
    return sum(_active(arch, tensor) for tensor in tensors(arch))


def matmul_parameters(arch: Arch) -> int:
    """Parameters that are factors of products: every matrix and the output head (tied or not), not the look-up."""
    return sum(tensor.numel for tensor in _matrices(arch))


def active_matmul_parameters(arch: Arch) -> int:
    """The matmul parameters one token meets."""
    return sum(_active(arch, tensor) for tensor in _matrices(arch))


def flops_per_sequence(arch: Arch, sequence: int, convention: Convention = Convention.CAUSAL) -> int:
    """Model FLOPs of training on one sequence: forward and backward, no recomputation."""
    done = (operation for unit in range(arch.num_units) for operation in operations(arch, unit, sequence, sequence))
    return sum(each.forward_flops(convention) + each.backward_flops(convention) for each in done)


def repeated_flops(arch: Arch, sequence: int, recompute: Recompute) -> int:
    """FLOPs of training on one sequence that recomputation repeats.

    Full: a block's whole forward. Selective: the attention core alone; the rest of what it makes again only moves.
    """
    if recompute is Recompute.NONE:
        return 0
    done = (each for unit in range(1, arch.head_unit) for each in operations(arch, unit, sequence, sequence))
    full = recompute is Recompute.FULL
    return sum(each.forward_flops() for each in done if full or each.kind is OperationKind.ATTENTION)


def flops_per_token(arch: Arch, sequence: int, convention: Convention = Convention.CAUSAL) -> float:
    """Model FLOPs of training on one token of a sequence of `sequence` tokens; exact wherever it is an integer."""
    return flops_per_sequence(arch, sequence, convention) / sequence


def _matrices(arch: Arch) -> Iterator[Tensor]:
    for tensor in tensors(arch):
        looked_up = tensor.unit == 0 and not tensor.tied
        if len(tensor.shape) >= 2 and not looked_up and LogicalAxis.POSITION not in tensor.axes:
            yield tensor


def _active(arch: Arch, tensor: Tensor) -> int:
    if arch.experts is None or LogicalAxis.EXPERTS not in tensor.axes:
        return tensor.numel
    return tensor.numel // arch.experts.count * arch.experts.active


def _embedding(arch: Arch, tokens: int) -> Iterator[Operation]:
    hidden = tokens * arch.hidden
    yield Operation("look-up", OperationKind.LOOKUP, read=tokens, written=hidden, weight=hidden)
    if arch.rope is None and not arch.alibi:
        yield _moving("positions", read=2 * hidden, written=hidden)
    if arch.embedding_norm:
        yield _norm(arch, "norm", tokens, arch.hidden)
    yield from _dropout(arch, "dropout", hidden)


def _head(arch: Arch, tokens: int) -> Iterator[Operation]:
    yield _norm(arch, "norm", tokens, arch.hidden)
    yield _matmul("logits", tokens, arch.vocab, arch.hidden)
    yield Operation("loss", OperationKind.LOSS, read=tokens * (arch.vocab + 1), written=tokens)


def _block(arch: Arch, layer: int, tokens: int, sequence: int) -> Iterator[Operation]:
    hidden = tokens * arch.hidden
    yield _norm(arch, "attention_norm", tokens, arch.hidden)
    yield from _attention(arch, tokens) if arch.latent is None else _latent_attention(arch, arch.latent, tokens)
    yield _scores(arch, layer, tokens, sequence)
    yield _matmul("attention.output", tokens, arch.hidden, arch.heads * arch.value_dim, bias=arch.output_bias)
    yield from _dropout(arch, "attention.dropout", hidden)
    yield _moving("attention.residual", read=2 * hidden, written=hidden)
    yield _norm(arch, "mlp_norm", tokens, arch.hidden)
    if arch.experts is not None and arch.is_routed(layer):
        yield from _routed(arch, arch.experts, tokens)
    else:
        yield from _feed_forward(arch, "mlp", tokens, arch.ffn)
    yield from _dropout(arch, "mlp.dropout", hidden)
    yield _moving("mlp.residual", read=2 * hidden, written=hidden)


def _attention(arch: Arch, tokens: int) -> Iterator[Operation]:
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    yield _matmul("attention.query", tokens, queries, arch.hidden, bias=arch.qkv_bias)
    yield _matmul("attention.key", tokens, keys, arch.hidden, bias=arch.qkv_bias)
    yield _matmul("attention.value", tokens, keys, arch.hidden, bias=arch.qkv_bias)
    if arch.qk_norm:
        yield _norm(arch, "attention.query_norm", tokens * arch.heads, arch.head_dim)
        yield _norm(arch, "attention.key_norm", tokens * arch.kv_heads, arch.head_dim)
    if arch.rope is not None:
        rotated = tokens * (queries + keys)
        yield _moving("attention.rope", read=rotated, written=rotated)


def _latent_attention(arch: Arch, latent: Latent, tokens: int) -> Iterator[Operation]:
    queries = arch.heads * arch.head_dim
    if latent.query_rank:
        yield _matmul("attention.query_down", tokens, latent.query_rank, arch.hidden)
        yield _norm(arch, "attention.query_latent_norm", tokens, latent.query_rank)
        yield _matmul("attention.query_up", tokens, queries, latent.query_rank)
    else:
        yield _matmul("attention.query", tokens, queries, arch.hidden)
    yield _matmul("attention.kv_down", tokens, latent.kv_rank + latent.rope_dim, arch.hidden)
    yield _norm(arch, "attention.kv_latent_norm", tokens, latent.kv_rank)
    yield _matmul("attention.kv_up", tokens, arch.heads * (latent.content_dim + latent.value_dim), latent.kv_rank)
    rotated = tokens * (arch.heads + 1) * latent.rope_dim
    yield _moving("attention.rope", read=rotated, written=rotated)


def _scores(arch: Arch, layer: int, tokens: int, sequence: int) -> Operation:
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    outputs = arch.heads * arch.value_dim
    return Operation(
        "attention.scores",
        OperationKind.ATTENTION,
        m=sequence,
        n=sequence,
        k=arch.head_dim,
        groups=tokens // sequence * arch.heads,
        values=arch.value_dim,
        window=min(arch.window(layer) or sequence, sequence),
        read=tokens * (queries + keys + arch.kv_heads * arch.value_dim),
        written=tokens * outputs,
    )


def _feed_forward(arch: Arch, path: str, tokens: int, width: int) -> Iterator[Operation]:
    if arch.gated:
        yield _matmul(f"{path}.gate", tokens, width, arch.hidden, bias=arch.mlp_bias)
    yield _matmul(f"{path}.up", tokens, width, arch.hidden, bias=arch.mlp_bias)
    yield _moving(f"{path}.activation", read=(1 + arch.gated) * tokens * width, written=tokens * width)
    yield _matmul(f"{path}.down", tokens, arch.hidden, width, bias=arch.mlp_bias)


def _routed(arch: Arch, experts: Experts, tokens: int) -> Iterator[Operation]:
    rows = tokens * experts.active
    yield _matmul("mlp.router", tokens, experts.count, arch.hidden)
    yield _moving("mlp.choice", read=tokens * experts.count, written=2 * rows)
    yield _moving("mlp.dispatch", read=rows * arch.hidden, written=rows * arch.hidden)
    if arch.gated:
        yield _matmul("mlp.experts.gate", rows, experts.ffn, arch.hidden, groups=experts.count)
    yield _matmul("mlp.experts.up", rows, experts.ffn, arch.hidden, groups=experts.count)
    yield _moving("mlp.experts.activation", read=(1 + arch.gated) * rows * experts.ffn, written=rows * experts.ffn)
    yield _matmul("mlp.experts.down", rows, arch.hidden, experts.ffn, groups=experts.count)
    yield _moving("mlp.combine", read=rows * (arch.hidden + 1), written=tokens * arch.hidden)
    if experts.shared:
        yield from _feed_forward(arch, "mlp.shared", tokens, experts.shared * experts.ffn)
        yield _moving("mlp.shared.add", read=2 * tokens * arch.hidden, written=tokens * arch.hidden)


def _matmul(name: str, m: int, n: int, k: int, groups: int = 1, bias: bool = False) -> Operation:
    return Operation(
        name,
        OperationKind.MATMUL,
        m=m,
        n=n,
        k=k,
        groups=groups,
        read=m * k,
        written=m * n,
        weight=groups * n * (k + bias),
    )


def _norm(arch: Arch, name: str, rows: int, width: int) -> Operation:
    weight = width * (2 if arch.norm is Norm.LAYER else 1)
    return Operation(name, OperationKind.NORM, read=rows * width, written=rows * width, weight=weight)


def _moving(name: str, read: int, written: int) -> Operation:
    return Operation(name, OperationKind.ELEMENTWISE, read=read, written=written)


def _dropout(arch: Arch, name: str, elements: int) -> Iterator[Operation]:
    if arch.dropout:
        yield _moving(name, read=elements, written=elements)
