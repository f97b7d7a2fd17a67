"""A model as data: units, and the logical tensors each unit owns.

Words
-----
unit            the grain of gather, forward and backward: the embedding (unit 0), a block (1 .. L) or the head (L + 1)
logical tensor  a weight as one process would hold it, whole and unpadded; every layout owns rectangles of it
logical axis    what a dimension of a tensor *means*; strategies cut by meaning, never by name
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, StrEnum


class UnitKind(Enum):
    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


class LogicalAxis(StrEnum):
    """The meaning of one dimension of a logical tensor."""

    VOCABULARY = "vocabulary"
    POSITION = "position"
    HIDDEN = "hidden"  # the residual stream
    HEADS = "heads"  # query heads x head_dim, head-major
    KV_HEADS = "kv_heads"  # key/value heads x head_dim, head-major
    HEAD_DIM = "head_dim"  # inside one head (q/k norm gains)
    FFN = "ffn"
    EXPERTS = "experts"
    EXPERT_FFN = "expert_ffn"
    ROUTES = "routes"  # the router's outputs, one an expert: whole wherever tokens are routed, unlike EXPERTS
    LATENT = "latent"  # a low-rank compression of queries or of keys and values


@dataclass(frozen=True, slots=True)
class Init:
    """Start value: a constant, or a counter-based normal-like number of standard deviation `std` around 0."""

    std: float = 0.0
    constant: float = 0.0


@dataclass(frozen=True, slots=True)
class Tensor:
    """One logical tensor.

    `name` is the path of the parameter in the plain model ("layers.3.attention.query.weight"); `unit` the unit that
    owns it; `readers` all units that read it (more than one only when it is tied). Linear weights are (out, in).
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[LogicalAxis, ...]
    init: Init
    unit: int
    readers: tuple[int, ...]
    trainable: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def tied(self) -> bool:
        return len(self.readers) > 1

    @property
    def decays(self) -> bool:
        """Weight decay applies to tensors of two or more logical dimensions, never to biases and norm gains."""
        return len(self.shape) >= 2
