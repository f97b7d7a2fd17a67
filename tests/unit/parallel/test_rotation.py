"""The engine's rotation against the plain model's: values, gradients, layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.model.attention import Rotation, rotate_both
from meshwright.parallel.rotation import direct_rotate

B, S, H, G, K = 2, 6, 4, 2, 8


def tables(dtype: torch.dtype, sequences: int = 1) -> tuple[Tensor, Tensor]:
    angles = torch.rand(sequences, S, 1, K // 2, dtype=torch.float64) * 7
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("sequences", [1, B], ids=["one table", "a table a sequence"])
@pytest.mark.parametrize(
    ("dtype", "of_tables", "tolerance"),
    [
        (torch.float64, torch.float64, 1e-15),
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.float32, 8e-3),
        (torch.float16, torch.float32, 1e-3),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_the_model(
    dtype: torch.dtype, of_tables: torch.dtype, tolerance: float, sequences: int
) -> None:
    torch.manual_seed(0)
    cos, sin = tables(of_tables, sequences)
    heads = [torch.randn(B, S, each, K).to(dtype) for each in (H, G)]
    cotangents = [torch.randn(B, each, S, K).to(dtype).transpose(1, 2) for each in (H, G)]
    mine, theirs = (results(each, heads, cotangents, cos, sin) for each in (direct_rotate, rotate_both))
    assert {each.dtype for each in mine} == {dtype}
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def results(turn: Rotation, heads: list[Tensor], cotangents: list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Queries and keys, turned, and the gradients of both."""
    q, k = (each.detach().requires_grad_() for each in heads)
    turned = turn(q, k, cos, sin)
    gradients = torch.autograd.grad(turned, (q, k), cotangents)
    assert all(each.is_contiguous() for each in turned)
    assert all(each.is_contiguous() for each in gradients)  # whatever the cotangent's layout: a view's is then a view
    return [*(each.detach() for each in turned), *gradients]


def test_columns_of_a_joined_product_are_read_in_place() -> None:
    """Under a tensor axis queries and keys are columns of one product."""
    cos, sin = tables(torch.float64)
    joined = torch.randn(B * S, (H + G) * K, dtype=torch.float64)
    q, k = joined[:, : H * K].view(B, S, H, K), joined[:, H * K :].view(B, S, G, K)
    for mine, theirs in zip(direct_rotate(q, k, cos, sin), rotate_both(q, k, cos, sin), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-15, atol=1e-15)


def test_backward_turns_back() -> None:
    """Rotations keep lengths: the gradient of half the squared length is x itself."""
    cos, sin = tables(torch.float64)
    q, k = (torch.randn(B, S, each, K, dtype=torch.float64, requires_grad=True) for each in (H, G))
    sum(each.square().sum() / 2 for each in direct_rotate(q, k, cos, sin)).backward()  # type: ignore[union-attr]
    for each in (q, k):
        torch.testing.assert_close(each.grad, each.detach(), rtol=1e-14, atol=1e-14)
