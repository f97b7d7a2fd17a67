"""Keys and values of the tokens so far, so that each new token of a text costs one token's work.

B  sequences    S  new tokens of each    Z  tokens so far, the new ones included    G  key/value heads    K  head_dim
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from meshwright.layout.rows import whole_rows
from meshwright.model.attention import Attention, attend
from meshwright.model.decoder import Block, Decoder
from meshwright.model.masks import attention_mask
from meshwright.model.rows import Sight, rows_to_torch

__all__ = ["Cache", "cached"]


class Cache:
    """The memory of one text in a decoder; at most `context` tokens."""

    def __init__(self, model: Decoder, context: int) -> None:
        self._model, self.context = model, context
        self.length = 0
        self._layers: list[_Layer] = []
        for number, attention in enumerate(_attentions(model)):
            self._layers.append(_Layer(self, model.arch.window(number)))
            attention.core = self._layers[-1].attend

    @torch.no_grad()
    def extend(self, tokens: list[int]) -> Tensor:
        """Read `tokens`, which follow those read before -> logits (V,) of the token after the last."""
        first, last = self.length, self.length + len(tokens)
        if last > self.context:
            raise ValueError(f"{last} tokens do not fit a context of {self.context}")
        weight = self._model.head.weight
        rows = whole_rows(0, np.zeros(1, dtype=np.int64), last).columns(np.arange(first, last))
        held = rows_to_torch(rows, self._model.arch, dtype=weight.dtype, device=weight.device)
        x_ND: Tensor = self._model.embedding(torch.tensor([tokens], device=weight.device), held)
        for block in self._model.layers:
            x_ND = block(x_ND, held)
        self.length = last
        logits_V: Tensor = self._model.head(x_ND[-1:], held)[0]
        return logits_V

    def forget(self) -> None:
        """Begin a new text."""
        self.length = 0


class _Layer:
    """Keys and values of one block, in memory for the whole context."""

    def __init__(self, cache: Cache, window: int) -> None:
        self._cache, self._window = cache, window
        self._keys = self._values = torch.empty(0)

    def attend(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, sight: Sight) -> Tensor:
        """Append the new keys and values, and let the new queries see all that is before them. -> (B, S, H, K)."""
        first = self._cache.length
        last = first + k_BSGK.shape[1]
        if not self._keys.numel():
            shape = (k_BSGK.shape[0], self._cache.context, *k_BSGK.shape[2:])
            self._keys, self._values = k_BSGK.new_empty(shape), v_BSGK.new_empty(shape)
        self._keys[:, first:last], self._values[:, first:last] = k_BSGK, v_BSGK
        offsets_1Z = torch.arange(last, device=k_BSGK.device)[None]
        mask_1SZ = attention_mask(offsets_1Z[:, first:], offsets_1Z, window=self._window)
        return attend(q_BSHK, self._keys[:, :last], self._values[:, :last], Sight(mask_1SZ))


@contextmanager
def cached(model: Decoder, context: int) -> Iterator[Cache]:
    """A cache in the attention of every block; inside, `model` is for this one text. It leaves as it was."""
    before = [attention.core for attention in _attentions(model)]
    try:
        yield Cache(model, context)
    finally:
        for attention, core in zip(_attentions(model), before, strict=True):
            attention.core = core


def _attentions(model: Decoder) -> list[Attention]:
    return [block.attention for block in model.layers if isinstance(block, Block)]
