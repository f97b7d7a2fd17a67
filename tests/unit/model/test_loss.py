"""The loss is one sum over one count: how a batch is split cannot matter."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.data.batch import IGNORED
from meshwright.model.loss import loss


def logits_with(losses: list[float]) -> torch.Tensor:
    """(N, 2) logits whose token losses for label 0 are `losses`: log(1 + e^x) = l."""
    return torch.tensor([[0.0, math.log(math.expm1(each))] for each in losses], dtype=torch.float64)


def test_shares_of_micro_batches_add_up_to_the_mean_over_all_tokens() -> None:
    """B01: sums 4.0 and 6.0 over 2 and 6 tokens are 10 / 8; the mean of means would be 1.5."""
    short, long = [2.0, 2.0, 9.0, 9.0, 9.0, 9.0], [1.0] * 6
    labels = torch.tensor([[0, 0, *[IGNORED] * 4], [0] * 6])
    count = torch.tensor(8)
    whole = loss(logits_with(short + long), labels, count)
    split = sum(
        float(loss(logits_with(one), labels[row : row + 1], count)) for row, one in enumerate((short, long))
    )  # fmt: skip
    assert float(whole) == pytest.approx(1.25, rel=1e-14)
    assert split == pytest.approx(1.25, rel=1e-14)


def test_gradients_of_the_shares_add_up_too() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.tensor([[0, 1, *[IGNORED] * 4], [2, 3, 4, 0, 1, 2]])
    (whole,) = torch.autograd.grad(loss(logits, labels, torch.tensor(8)), logits)
    shares = [loss(logits[6 * row : 6 * row + 6], labels[row : row + 1], torch.tensor(8)) for row in (0, 1)]
    (split,) = torch.autograd.grad(shares[0] + shares[1], logits)
    torch.testing.assert_close(split, whole, rtol=1e-14, atol=1e-16)


def test_no_trained_token_is_zero_with_a_zero_gradient() -> None:
    """B02: 0 / 0 made it NaN, on every rank."""
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    share = loss(logits, torch.full((2, 2), IGNORED), torch.tensor(0))
    share.backward()
    assert float(share.detach()) == 0.0
    assert logits.grad is not None
    assert not bool(logits.grad.any())
