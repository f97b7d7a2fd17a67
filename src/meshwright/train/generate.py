"""Text from a model, token by token: the plain model on one process, each new token at the cost of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.model.cache import cached
from meshwright.model.decoder import Decoder
from meshwright.train.nonfinite import NonfiniteError

__all__ = ["Sampling", "choose", "generate"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn. `temperature` 0 takes the likeliest; `top_k` 0 and `top_p` 1 leave none out."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def generate(
    model: Decoder,
    prompt: Sequence[int],
    count: int,
    *,
    context: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | Sequence[int] | None = None,
) -> Iterator[int]:
    """At most `count` tokens that follow `prompt`, which must not be empty.

    `context`: tokens the model looks back on at most; where a text outgrows it, its later half is read anew. Tokens
    are drawn by a generator of its own that starts at `seed`. Ends before a token of `stop`. Raises what `choose` does.
    """
    if not prompt:
        raise ValueError("a prompt of at least one token is needed")
    stops = {stop} if isinstance(stop, int) else set(stop or ())
    sampling = Sampling(temperature, top_k, top_p)
    model.eval()
    random = torch.Generator().manual_seed(seed)
    held = list(prompt)[-context:]
    with cached(model, context) as cache:
        new = held
        for _ in range(count):
            if cache.length + len(new) > context:
                cache.forget()
                new = held[-max(context // 2, 1) :]
                held = list(new)
            token = choose(cache.extend(new).double().cpu(), sampling, random)
            if token in stops:
                return
            held.append(token)
            new = [token]
            yield token


def choose(logits_V: Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """Draw a token: logits (V,) divided by the temperature, the `top_k` likeliest kept, of them the fewest whose
    probabilities reach `top_p` (Holtzman et al. 2020, arXiv:1904.09751, section 3.1), the rest renormalised. Raises
    NonfiniteError where a logit is NaN or infinite."""
    if not bool(torch.isfinite(logits_V).all()):
        raise NonfiniteError("the model's logits are not finite: look at its weights, they may hold NaN")
    if sampling.temperature <= 0:
        return int(logits_V.argmax())
    shares_V = torch.softmax((logits_V - logits_V.max()) / sampling.temperature, -1)  # no temperature overflows below 0
    sorted_V, order_V = shares_V.sort(descending=True, stable=True)
    if sampling.top_k:
        sorted_V[sampling.top_k :] = 0
    if sampling.top_p < 1:
        sorted_V /= sorted_V.sum()
        before_V = sorted_V.cumsum(-1) - sorted_V
        sorted_V[before_V >= sampling.top_p] = 0
    return int(order_V[int(torch.multinomial(sorted_V, 1, generator=random))])
