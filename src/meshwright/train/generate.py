"""Text from a model, token by token: the plain model on one process, the whole context run again for each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from meshwright.layout.rows import whole_rows
from meshwright.model.decoder import Decoder
from meshwright.model.rows import rows_to_torch

__all__ = ["generate"]


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: Sequence[int],
    count: int,
    *,
    context: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """At most `count` tokens that follow `prompt`, which must not be empty.

    `context`: tokens the model looks back on at most. `temperature` 0 takes the likeliest token; above, tokens are
    drawn by a generator of its own that starts at `seed`. Ends before the token `stop`.
    """
    if not prompt:
        raise ValueError("a prompt of at least one token is needed")
    weight = model.head.weight
    model.eval()
    random = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        held = tokens[-context:]
        rows = rows_to_torch(
            whole_rows(0, np.zeros(1, dtype=np.int64), len(held)), model.arch, dtype=weight.dtype, device=weight.device
        )
        x = torch.tensor([held], device=weight.device)
        for unit in model.units[:-1]:
            x = unit(x, rows)
        logits_V = model.head(x[-1:], rows)[0].double().cpu()
        token = _choose(logits_V, temperature, random)
        if token == stop:
            return
        tokens.append(token)
        yield token


def _choose(logits_V: torch.Tensor, temperature: float, random: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits_V.argmax())
    return int(torch.multinomial(torch.softmax(logits_V / temperature, -1), 1, generator=random))
