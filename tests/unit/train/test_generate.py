"""Sampling: what may be drawn, how often, and that a text does not depend on the cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshwright.layout.rows import whole_rows
from meshwright.model.rows import rows_to_torch
from meshwright.train.generate import Sampling, choose, generate
from meshwright.train.nonfinite import NonfiniteError
from tests.unit.model.tiny import LLAMA, decoder_of, logits_of


def drawn(sampling: Sampling, draws: int = 4000) -> torch.Tensor:
    """(4,) shares of tokens with probabilities 0.5 0.25 0.15 0.1."""
    logits = torch.tensor([0.15, 0.5, 0.1, 0.25], dtype=torch.float64).log()
    random = torch.Generator().manual_seed(0)
    counts = torch.zeros(4)
    for _ in range(draws):
        counts[choose(logits, sampling, random)] += 1
    return counts / draws


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(0.0), [0.0, 1.0, 0.0, 0.0]),
        (Sampling(1.0), [0.15, 0.5, 0.1, 0.25]),
        (Sampling(1.0, top_k=2), [0, 2 / 3, 0, 1 / 3]),
        (Sampling(1.0, top_p=0.7), [0, 2 / 3, 0, 1 / 3]),
        (Sampling(1.0, top_p=0.85), [0.15 / 0.9, 0.5 / 0.9, 0, 0.25 / 0.9]),
        (Sampling(1.0, top_p=1e-9), [0.0, 1.0, 0.0, 0.0]),
        (Sampling(1.0, top_k=3, top_p=0.6), [0, 2 / 3, 0, 1 / 3]),
        (Sampling(0.5), [0.0225 / 0.345, 0.25 / 0.345, 0.01 / 0.345, 0.0625 / 0.345]),
    ],
)
def test_shares_of_tokens(sampling: Sampling, expected: list[float]) -> None:
    shares = drawn(sampling)
    torch.testing.assert_close(shares, torch.tensor(expected), rtol=0, atol=0.03)
    assert bool((shares[torch.tensor(expected) == 0] == 0).all())


def test_greedy_text_is_that_of_the_whole_model() -> None:
    decoder = decoder_of(LLAMA).eval()
    tokens = [3, 1, 4]
    for _ in range(12):
        rows = rows_to_torch(whole_rows(0, np.zeros(1, dtype=np.int64), len(tokens)), LLAMA, dtype=torch.float64)
        tokens.append(int(logits_of(decoder, torch.tensor([tokens]), rows)[0, -1].argmax()))
    assert list(generate(decoder, [3, 1, 4], 12, context=64)) == tokens[3:]


def test_a_text_may_outgrow_its_context() -> None:
    decoder = decoder_of(LLAMA)
    text = list(generate(decoder, [3, 1, 4], 40, context=8, temperature=1.0, seed=1))
    assert len(text) == 40
    assert text == list(generate(decoder, [3, 1, 4], 40, context=8, temperature=1.0, seed=1))
    assert text != list(generate(decoder, [3, 1, 4], 40, context=8, temperature=1.0, seed=2))
    assert len(list(generate(decoder, list(range(30)), 3, context=8))) == 3


def test_it_stops_before_a_stop_token() -> None:
    decoder = decoder_of(LLAMA)
    text = list(generate(decoder, [3, 1, 4], 12, context=64))
    assert list(generate(decoder, [3, 1, 4], 12, context=64, stop=[text[5]])) == text[: text.index(text[5])]
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(decoder, [], 1, context=4))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_told(temperature: float, wrong: float) -> None:
    """The likeliest of NaN is token 0, for ever; drawing fails in torch's own words."""
    with pytest.raises(NonfiniteError, match="logits are not finite"):
        choose(torch.tensor([0.0, wrong]), Sampling(temperature), torch.Generator())


def test_the_smallest_temperature_takes_the_likeliest() -> None:
    logits = torch.tensor([1.0, 900.0, 3.0], dtype=torch.float64)
    assert choose(logits, Sampling(5e-324), torch.Generator()) == 1
