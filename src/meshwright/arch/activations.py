"""What a unit keeps from its forward for its backward: a table of named tensors, in order of execution.

    kept by the executor    the unit's input (its gradient is the cotangent sent back)
    kept by autograd        inputs of products, operands of products of two activations, statistics of norms,
                            queries, keys, values, outputs and log-sum-exps of attention (never its probabilities),
                            masks of dropout, log-probabilities of the loss

Parameters, tokens, labels and rows (rotary tables, boolean masks) are nobody's activations: they are alive anyway.
Tensors that share storage stand once. Families that run are measured against autograd's saved tensors; routed experts
and latent attention follow the same rules, unmeasured until they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from meshwright.arch.arch import Arch, Experts, Latent, Norm
from meshwright.arch.heads import met_kv_heads
from meshwright.arch.tensors import UnitKind
from meshwright.config.choices import Dtype


class Role(Enum):
    """What decides the size of an element."""

    COMPUTE = "compute"  # the compute dtype
    PRECISE = "precise"  # the compute dtype, at least float32
    UPCAST = "upcast"  # a float32 copy that exists only where the compute dtype is narrower
    MASK = "mask"  # one byte
    INDEX = "index"  # int64

    def num_bytes(self, compute: Dtype) -> int:
        """Bytes of an element; 0 where the tensor does not exist."""
        match self:
            case Role.COMPUTE:
                return compute.num_bytes
            case Role.PRECISE:
                return max(4, compute.num_bytes)
            case Role.UPCAST:
                return 4 if compute.num_bytes < 4 else 0
            case Role.MASK:
                return 1
            case Role.INDEX:
                return 8


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor kept for backward: its name within the unit, its elements, what an element is."""

    name: str
    elements: int
    role: Role = Role.COMPUTE


@dataclass(frozen=True, slots=True)
class Crossing:
    """How attention crosses a context axis: `ring` parts of a sequence, of which this rank works on the `place`-th,
    whose keys and values come round or are all `gathered`; `ulysses` ranks of a part exchange heads for tokens."""

    ring: int
    ulysses: int
    gathered: bool = False
    place: int = 0

    def met_heads(self, kv_heads: int) -> int:
        """Key/value heads that the ranks of a part work on: a head once for each rank that needs it."""
        return met_kv_heads(kv_heads, self.ulysses)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a micro-batch and its kernels decide, besides the architecture.

    `masked`       documents are masked or sequences padded: attention reads a mask of its own for every sequence
    `fused_norms`  norms are CUDA's kernels, or RMSNorm the engine's: input and float32 statistics are kept. The plain
                   model's RMSNorm is composed of primitives on the CPU, which keep a float32 input and the normalised
                   input as well, and the statistics of LayerNorm have the compute dtype there
    `selective`    products keep the recipe of their input: norms, the attention core and the activation are made again
    `ways`         tensor ranks. On a tensor axis query, key and value are views of one product, so that who keeps one
                   keeps all; the look-up keeps which tokens are its own, the loss exponentials of the compute dtype
    `rings`        what is scattered after a product goes round in chunks: three of them exist at a time
    `direct`       a scatter is messages, as on gloo: a chunk arrives from every other rank before they are added up
    `threads`      of a CPU's kernels, where working memory counts
    `gathers`      the outputs of norms are gathered along the tokens for their products, which keep them (sequence
                   parallel): no recipe sends them again
    `arriving`     rows that the experts of a rank get from all ranks of their axis; None: those of its own tokens
    `crossing`     of a context axis, where `sequence` counts the tokens held; None without one
    """

    sequences: int
    sequence: int
    masked: bool = False
    fused_norms: bool = False
    selective: bool = False
    gathers: bool = False
    ways: int = 1
    rings: bool = False
    direct: bool = True
    threads: int = 0
    arriving: int | None = None
    crossing: Crossing | None = None

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence

    @property
    def queries(self) -> int:
        """Tokens of a sequence that attention works on at once."""
        return self.sequence * (self.crossing.ulysses if self.crossing else 1)

    @property
    def whole(self) -> int:
        """Tokens of a whole sequence."""
        return self.queries * (self.crossing.ring if self.crossing else 1)

    def expert_rows(self, experts: Experts) -> int:
        """Rows of this rank's experts together."""
        return self.tokens * experts.active if self.arriving is None else self.arriving


def saved(arch: Arch, unit: int, setting: Setting) -> tuple[Saved, ...]:
    """The tensors that `unit` keeps for its backward, whole (as one process would keep them)."""
    match arch.unit_kind(unit):
        case UnitKind.EMBEDDING:
            return tuple(_embedding(arch, setting))
        case UnitKind.BLOCK:
            return tuple(_block(arch, unit - 1, setting))
        case UnitKind.HEAD:
            return tuple(_head(arch, setting))


def saved_bytes(arch: Arch, unit: int, setting: Setting, compute: Dtype) -> int:
    """Bytes of `saved` where products are computed in `compute`."""
    return sum(each.elements * each.role.num_bytes(compute) for each in saved(arch, unit, setting))


def kept_bytes(arch: Arch, unit: int, setting: Setting, compute: Dtype) -> dict[str, int]:
    """What a tensor rank keeps of `saved`, by name; `arch` is narrowed to that rank. Under sequence parallel what lies
    outside the columns and rows is cut along the tokens. Norms of queries and keys lie between: they are cut along the
    heads."""
    return dict(_kept(arch, unit, setting, compute))


@lru_cache(maxsize=16384)
def _kept(arch: Arch, unit: int, setting: Setting, compute: Dtype) -> tuple[tuple[str, int], ...]:
    def ways(name: str) -> int:
        module, _, rest = name.partition(".")
        of_stream = name == "input" or module.endswith("dropout") or (module.endswith("norm") and rest != "output")
        return setting.ways if setting.gathers and of_stream else 1

    return tuple(
        (each.name, each.elements // ways(each.name) * each.role.num_bytes(compute))
        for each in saved(arch, unit, setting)
    )


def _embedding(arch: Arch, setting: Setting) -> Iterator[Saved]:
    if setting.ways > 1:
        yield Saved("local", setting.tokens, Role.INDEX)
        yield Saved("elsewhere", setting.tokens, Role.MASK)
    if arch.embedding_norm:
        yield from _norm(arch, setting, "norm", setting.tokens, arch.hidden)
    yield from _dropout(arch, setting, "dropout")


def _head(arch: Arch, setting: Setting) -> Iterator[Saved]:
    yield from _border(arch, setting, "norm")
    yield Saved("norm.output", setting.tokens * arch.hidden)
    if setting.ways > 1:
        yield Saved("loss.raised", setting.tokens * arch.vocab)
        yield Saved("loss.factor", setting.tokens, Role.PRECISE)
    else:
        yield Saved("loss.log_probabilities", setting.tokens * arch.vocab, Role.PRECISE)
    yield Saved("loss.weights", 2, Role.PRECISE)  # the kernel's own and the number of trained tokens


def _block(arch: Arch, layer: int, setting: Setting) -> Iterator[Saved]:
    if setting.selective and arch.latent is None:
        yield from _selective_block(arch, layer, setting)
        return
    hidden = setting.tokens * arch.hidden
    yield from _border(arch, setting, "attention_norm")
    yield Saved("attention_norm.output", hidden)
    if arch.latent is None:
        yield from _projections(arch, setting)
    else:
        yield from _latent_projections(arch, arch.latent, setting)
    yield from _scores(arch, layer, setting)
    yield from _dropout(arch, setting, "attention_dropout")
    yield from _norm(arch, setting, "mlp_norm", setting.tokens, arch.hidden)
    yield Saved("mlp_norm.output", hidden)
    if arch.experts is not None and arch.is_routed(layer):
        yield from _routed(arch, arch.experts, setting)
    else:
        yield from _feed_forward(arch, "mlp", setting.tokens, arch.ffn)
    yield from _dropout(arch, setting, "mlp_dropout")


def _selective_block(arch: Arch, layer: int, setting: Setting) -> Iterator[Saved]:
    """What recipes are made from: the stream twice, and what the products of the first kind made."""
    tokens = setting.tokens
    if setting.gathers:
        yield from _border(arch, setting, "attention_norm")
        yield Saved("attention_norm.output", tokens * arch.hidden)
    else:
        yield Saved("input", tokens * arch.hidden)
    if setting.crossing is not None:  # made again, it would be sent again
        yield from _projections(arch, setting)
        yield from _crossing_scores(arch, layer, setting, setting.crossing)
    else:
        yield Saved("attention.query", tokens * arch.heads * arch.head_dim)
        yield Saved("attention.key", tokens * arch.kv_heads * arch.head_dim)
        yield Saved("attention.value", tokens * arch.kv_heads * arch.value_dim)
    yield from _dropout(arch, setting, "attention_dropout")
    if arch.experts is not None and arch.is_routed(layer):
        yield from _norm(arch, setting, "mlp_norm", tokens, arch.hidden)
        yield Saved("mlp_norm.output", tokens * arch.hidden)
        yield from _routed(arch, arch.experts, setting)
        yield from _dropout(arch, setting, "mlp_dropout")
        return
    if setting.gathers:
        yield from _norm(arch, setting, "mlp_norm", tokens, arch.hidden)
        yield Saved("mlp_norm.output", tokens * arch.hidden)
    else:
        yield Saved("mlp_norm.input", tokens * arch.hidden)
    if arch.gated:
        yield Saved("mlp.gate", tokens * arch.ffn)
    yield Saved("mlp.up", tokens * arch.ffn)
    yield from _dropout(arch, setting, "mlp_dropout")


def _projections(arch: Arch, setting: Setting) -> Iterator[Saved]:
    """Only norms keep what the projections made; rotation keeps nothing, attention keeps what it is given."""
    if arch.qk_norm:
        yield from _norm(arch, setting, "attention.query_norm", setting.tokens * arch.heads, arch.head_dim)
        yield from _norm(arch, setting, "attention.key_norm", setting.tokens * arch.kv_heads, arch.head_dim)


def _latent_projections(arch: Arch, latent: Latent, setting: Setting) -> Iterator[Saved]:
    if latent.query_rank:
        yield from _norm(arch, setting, "attention.query_latent_norm", setting.tokens, latent.query_rank)
        yield Saved("attention.query_latent_norm.output", setting.tokens * latent.query_rank)
    yield from _norm(arch, setting, "attention.kv_latent_norm", setting.tokens, latent.kv_rank)
    yield Saved("attention.kv_latent_norm.output", setting.tokens * latent.kv_rank)


def _scores(arch: Arch, layer: int, setting: Setting) -> Iterator[Saved]:
    if setting.crossing is not None:
        yield from _crossing_scores(arch, layer, setting, setting.crossing)
        return
    tokens, sequence = setting.tokens, setting.sequence
    yield Saved("attention.query", tokens * arch.heads * arch.head_dim)
    yield Saved("attention.key", tokens * arch.kv_heads * arch.head_dim)
    yield Saved("attention.value", tokens * arch.kv_heads * arch.value_dim)
    if setting.ways > 1 and arch.rope is not None and not arch.qk_norm:
        yield Saved("attention.unrotated", tokens * (arch.heads + arch.kv_heads) * arch.head_dim)
    if setting.masked:
        yield Saved("attention.mask", setting.sequences * sequence**2)
    elif 0 < arch.window(layer) < sequence:
        yield Saved("attention.mask", sequence**2)  # one serves all sequences
    yield Saved("attention.log_sum_exp", tokens * arch.heads, Role.PRECISE)
    yield Saved("attention.output", tokens * arch.heads * arch.value_dim)


def _crossing_scores(arch: Arch, layer: int, setting: Setting, crossing: Crossing) -> Iterator[Saved]:
    """Keys and values are packed, so that what products made is let go; but on a tensor axis those are one, of which
    queries that nothing turns, or what norms of heads read, are views."""
    tokens = setting.tokens
    met = tokens * crossing.met_heads(arch.kv_heads) * (crossing.ring if crossing.gathered else 1)
    yield Saved("attention.query", tokens * arch.heads * arch.head_dim)
    yield Saved("attention.key", met * arch.head_dim)
    yield Saved("attention.value", met * arch.value_dim)
    own = tokens * arch.kv_heads * arch.value_dim
    if setting.ways > 1 and arch.qk_norm:
        yield Saved("attention.unpacked", own)
    elif setting.ways > 1 and arch.rope is None and crossing.ulysses == 1:
        yield Saved("attention.unpacked", 2 * own)
    if crossing.ring == 1 and (setting.masked or 0 < arch.window(layer) < setting.whole):
        yield Saved("attention.mask", (setting.sequences if setting.masked else 1) * setting.whole**2)
    yield Saved("attention.log_sum_exp", tokens * arch.heads, Role.PRECISE)
    if crossing.ulysses > 1:
        yield Saved("attention.core", tokens * arch.heads * arch.value_dim)
    yield Saved("attention.output", tokens * arch.heads * arch.value_dim)


def _feed_forward(arch: Arch, path: str, rows: int, width: int) -> Iterator[Saved]:
    if not arch.gated:
        yield Saved(f"{path}.up", rows * width)
        yield Saved(f"{path}.activation", rows * width)
        return
    yield Saved(f"{path}.gate", rows * width)
    yield Saved(f"{path}.activation", rows * width)
    yield Saved(f"{path}.up", rows * width)
    yield Saved(f"{path}.product", rows * width)


def _routed(arch: Arch, experts: Experts, setting: Setting) -> Iterator[Saved]:
    rows, here = setting.tokens * experts.active, setting.expert_rows(experts)
    yield Saved("mlp.router.probabilities", setting.tokens * experts.count, Role.PRECISE)
    if experts.normalise:
        yield Saved("mlp.router.chosen", rows + setting.tokens, Role.PRECISE)  # and their sum
    yield Saved("mlp.router.choice", rows, Role.INDEX)
    yield Saved("mlp.router.order", 3 * rows, Role.INDEX)  # of choices by expert, the token of each, where each lies
    yield Saved("mlp.router.weights", rows)
    yield Saved("mlp.experts.input", here * arch.hidden)
    yield from _feed_forward(arch, "mlp.experts", here, experts.ffn)
    yield Saved("mlp.experts.output", rows * arch.hidden)
    if experts.shared:
        yield from _feed_forward(arch, "mlp.shared", setting.tokens, experts.shared * experts.ffn)


def _border(arch: Arch, setting: Setting, norm: str) -> Iterator[Saved]:
    """The unit's input and its first norm: the input stays as it came, whatever the norm keeps."""
    yield Saved("input", setting.tokens * arch.hidden)
    if _composed(arch, setting):
        yield Saved(f"{norm}.input", setting.tokens * arch.hidden, Role.UPCAST)
    yield from _statistics(arch, setting, norm, setting.tokens, arch.hidden)


def _norm(arch: Arch, setting: Setting, name: str, rows: int, width: int) -> Iterator[Saved]:
    yield Saved(f"{name}.input", rows * width, Role.PRECISE if _composed(arch, setting) else Role.COMPUTE)
    yield from _statistics(arch, setting, name, rows, width)


def _statistics(arch: Arch, setting: Setting, name: str, rows: int, width: int) -> Iterator[Saved]:
    role = Role.COMPUTE if arch.norm is Norm.LAYER and not setting.fused_norms else Role.PRECISE
    if arch.norm is Norm.LAYER:
        yield Saved(f"{name}.mean", rows, role)
    yield Saved(f"{name}.scale", rows, role)
    if _composed(arch, setting):
        yield Saved(f"{name}.normalised", rows * width, Role.PRECISE)


def _composed(arch: Arch, setting: Setting) -> bool:
    return arch.norm is Norm.RMS and not setting.fused_norms


def _dropout(arch: Arch, setting: Setting, name: str) -> Iterator[Saved]:
    if arch.dropout:
        yield Saved(name, setting.tokens * arch.hidden, Role.MASK)
