"""The decoder: plain PyTorch, whole, on one device. Strategies replace forwards of its modules, never its shape.

    B  sequences      S  tokens of each      N = B*S      D  hidden      V  vocabulary

    tokens_BS -> embedding -> x_ND -> layers[0] -> x_ND -> ... -> head -> logits_NV
                 unit 0               unit 1                      unit L + 1

Between units the residual stream is flat over tokens, so that a cut along the sequence is a cut of dim 0. Every unit
takes (x, rows); a model may be run unit by unit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshwright.arch.arch import Arch
from meshwright.arch.unbuilt import lacking
from meshwright.model.attention import Attention
from meshwright.model.dropout import Dropout, Site
from meshwright.model.loss import projected_loss
from meshwright.model.mlp import build_mlp
from meshwright.model.moe import RoutedMLP
from meshwright.model.norms import build_norm
from meshwright.model.rows import Rows

Lookup = Callable[[Tensor, Rows, Tensor, Tensor | None], Tensor]
"""(tokens (B, S), rows, weight (V, D), positions or None) -> (N, D)."""

Criterion = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(normed x (N, D), weight (V, D), labels (B, S), count ()) -> (): see `Head.loss`."""


def look_up(tokens_BS: Tensor, rows: Rows, weight_VD: Tensor, positions: Tensor | None) -> Tensor:
    """Rows of the table of tokens, and of learned positions where there are any."""
    x_BSD = nn.functional.embedding(tokens_BS, weight_VD)
    if positions is not None:
        x_BSD = x_BSD + nn.functional.embedding(rows.positions, positions)
    return x_BSD.flatten(0, 1)


class Embedding(nn.Module):
    """Look-up of tokens, plus learned positions where the architecture does not rotate."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(arch.vocab, arch.hidden))
        self.positions = nn.Parameter(torch.empty(arch.max_positions, arch.hidden)) if arch.rope is None else None
        self.norm = build_norm(arch, arch.hidden) if arch.embedding_norm else nn.Identity()
        self.dropout = Dropout(arch.dropout, Site.EMBEDDING)
        self.lookup: Lookup = look_up

    def forward(self, tokens_BS: Tensor, rows: Rows) -> Tensor:
        """(B, S) int64 -> (N, D)."""
        looked_up_ND = self.lookup(tokens_BS, rows, self.weight, self.positions)
        x_ND: Tensor = self.dropout(self.norm(looked_up_ND), rows)
        return x_ND


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (pre-norm, Xiong et al. 2020, arXiv:2002.04745)."""

    def __init__(self, arch: Arch, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(arch, arch.hidden)
        self.attention = Attention(arch, layer)
        self.attention_dropout = Dropout(arch.dropout, Site.ATTENTION_OUTPUT, layer)
        self.mlp_norm = build_norm(arch, arch.hidden)
        self.mlp = RoutedMLP(arch) if arch.is_routed(layer) else build_mlp(arch)
        self.mlp_dropout = Dropout(arch.dropout, Site.MLP_OUTPUT, layer)

    def forward(self, x_ND: Tensor, rows: Rows) -> Tensor:
        """(N, D) -> (N, D)."""
        x_ND = x_ND + self.attention_dropout(self.attention(self.attention_norm(x_ND), rows), rows)
        x_ND = x_ND + self.mlp_dropout(self.mlp(self.mlp_norm(x_ND), rows), rows)
        return x_ND


class Head(nn.Module):
    """Final norm and output projection; a tied head holds the embedding's own parameter."""

    def __init__(self, arch: Arch, tied_weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.norm = build_norm(arch, arch.hidden)
        self.weight = nn.Parameter(torch.empty(arch.vocab, arch.hidden)) if tied_weight is None else tied_weight
        self.criterion: Criterion = projected_loss

    def forward(self, x_ND: Tensor, rows: Rows) -> Tensor:
        """(N, D) -> logits (N, V)."""
        return nn.functional.linear(self.norm(x_ND), self.weight)

    def loss(self, x_ND: Tensor, rows: Rows, labels_BS: Tensor, count: Tensor) -> Tensor:
        """(N, D) -> (): the sum of token losses over `count`, the trained tokens of the global batch."""
        return self.criterion(self.norm(x_ND), self.weight, labels_BS, count)


class Decoder(nn.Module):
    """A decoder-only transformer; parameter names are those of `arch.parameters.tensors`."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        self.embedding = Embedding(arch)
        self.layers = nn.ModuleList(Block(arch, layer) for layer in range(arch.layers))
        self.head = Head(arch, self.embedding.weight if arch.tie_embeddings else None)

    @property
    def units(self) -> list[nn.Module]:
        """Embedding, blocks, head."""
        return [self.embedding, *self.layers, self.head]

    def forward(self, tokens_BS: Tensor, rows: Rows) -> Tensor:
        """(B, S) int64 -> logits (N, V)."""
        logits_NV: Tensor = self.head(self._stream(tokens_BS, rows), rows)
        return logits_NV

    def loss(self, tokens_BS: Tensor, rows: Rows, labels_BS: Tensor, count: Tensor) -> Tensor:
        """Tokens and labels (B, S) int64, count () -> (); see `Head.loss`."""
        return self.head.loss(self._stream(tokens_BS, rows), rows, labels_BS, count)

    def _stream(self, tokens_BS: Tensor, rows: Rows) -> Tensor:
        x_ND: Tensor = self.embedding(tokens_BS, rows)
        for block in self.layers:
            x_ND = block(x_ND, rows)
        return x_ND


def build_decoder(arch: Arch, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "meta") -> Decoder:
    """The plain model with parameters of `dtype` and no values yet: see `initialise`, or load them.

    On "meta" it costs no memory. Raises NotImplementedError for architectures that can be priced but not run.
    """
    for part in lacking(arch):
        raise NotImplementedError(f"{arch.family} needs {part}: it can be planned and priced, but not run yet")
    with torch.device("meta"):  # no time or random numbers go into values that nobody will read
        decoder = Decoder(arch)
        for parameter in decoder.parameters():  # not `to`, which wants to exchange parameters that are fake tensors
            parameter.data = parameter.data.to(dtype)
    if torch.device(device).type != "meta":
        decoder.to_empty(device=device)
        if arch.tie_embeddings:  # to_empty gives every module a parameter of its own
            decoder.head.weight = decoder.embedding.weight
    return decoder
