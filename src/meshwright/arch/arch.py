"""The decoder as numbers: everything that decides its logical tensors and its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshwright.arch.tensors import UnitKind


class Norm(StrEnum):
    RMS = "rms"
    LAYER = "layer"


class Activation(StrEnum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


class RopeScaling(StrEnum):
    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864, eq. 34), half-split pairs, and how they are stretched.

    `factor` stretches positions; `original_positions` is the context before stretching. `low`/`high` are the frequency
    factors of llama3 and `beta_slow`/`beta_fast` those of yarn (arXiv:2309.00071); `attention_factor` 0 derives it.
    """

    theta: float = 10_000.0
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_positions: int = 0
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed feed-forward: `count` experts of width `ffn`, `active` a token (0 shared experts unless said)."""

    count: int
    active: int
    ffn: int
    shared: int = 0
    normalise: bool = True  # the chosen routing weights are divided by their sum
    dense_layers: int = 0  # the first blocks keep a dense feed-forward


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): low-rank queries, keys and values, in elements.

    A query or key head is `content_dim` unrotated and `rope_dim` rotated elements; the rotated key is shared by all
    heads. `Arch.head_dim` is their sum, `Arch.kv_heads` equals `Arch.heads`.
    """

    query_rank: int  # 0: queries are not compressed
    kv_rank: int
    content_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Arch:
    """A decoder-only transformer. Sizes are elements; `ffn` is the width of the (gated) feed-forward.

    Units: 0 is the embedding, 1 .. layers the blocks, layers + 1 the head (final norm, output projection, loss).
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm: Norm = Norm.RMS
    norm_eps: float = 1e-5
    activation: Activation = Activation.SILU
    gated: bool = True
    rope: Rope | None = Rope()  # None: learned absolute positions
    max_positions: int = 0  # learned: rows of their table, a limit; rotary: the context it was made for (0: unsaid)
    sliding_window: int = 0  # 0: none; w: a token sees itself and the w - 1 before it
    windowed_layers: tuple[int, ...] = ()  # which blocks slide; empty with a window: all of them
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    alibi: bool = False  # with rope None: no table of positions, a linear bias on the scores (arXiv:2108.12409)
    embedding_norm: bool = False  # a norm right after the look-up
    dropout: float = 0.0

    @property
    def num_units(self) -> int:
        return self.layers + 2

    @property
    def head_unit(self) -> int:
        return self.layers + 1

    @property
    def value_dim(self) -> int:
        """Elements of one value head: head_dim, unless attention is latent."""
        return self.latent.value_dim if self.latent else self.head_dim

    def is_routed(self, layer: int) -> bool:
        """Whether block `layer` (0 ..) has experts for its feed-forward."""
        return self.experts is not None and layer >= self.experts.dense_layers

    def is_routed_unit(self, unit: int) -> bool:
        """Whether `unit` is a block with experts."""
        return 0 < unit < self.head_unit and self.is_routed(unit - 1)

    def window(self, layer: int) -> int:
        """The sliding window of block `layer` (0 ..) in tokens, itself included; 0: it sees all before it."""
        slides = not self.windowed_layers or layer in self.windowed_layers
        return self.sliding_window if slides else 0

    def unit_kind(self, unit: int) -> UnitKind:
        if unit == 0:
            return UnitKind.EMBEDDING
        return UnitKind.HEAD if unit == self.head_unit else UnitKind.BLOCK

    def unit_name(self, unit: int) -> str:
        """Where the unit lives in the plain model: "embedding", "layers.<i>", "head"."""
        kind = self.unit_kind(unit)
        return f"layers.{unit - 1}" if kind is UnitKind.BLOCK else kind.value
