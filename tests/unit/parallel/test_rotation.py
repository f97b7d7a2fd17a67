"""The engine's rotation against the plain model's: values, gradients, layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.model.rope import rotate
from meshwright.parallel.rotation import direct_rotate

B, S, H, K = 2, 6, 3, 8


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
    x, g = torch.randn(B, S, H, K).to(dtype), torch.randn(B, H, S, K).to(dtype).transpose(1, 2)
    (mine, gradient), (theirs, expected) = (results(each, x, g, cos, sin) for each in (direct_rotate, rotate))
    assert mine.dtype is gradient.dtype is dtype
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)


def results(turn: object, x: Tensor, g: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = turn(x, cos, sin)  # type: ignore[operator]
    (gradient,) = torch.autograd.grad(y, x, g)
    assert y.is_contiguous()
    assert gradient.is_contiguous()  # whatever the layout of the cotangent: a view's gradient is then a view
    return y.detach(), gradient


def test_columns_of_a_joined_product_are_read_in_place() -> None:
    """Under a tensor axis queries and keys are columns of one product."""
    cos, sin = tables(torch.float64)
    joined = torch.randn(B * S, 3 * H * K, dtype=torch.float64)
    x = joined[:, H * K : 2 * H * K].view(B, S, H, K)
    torch.testing.assert_close(direct_rotate(x, cos, sin), rotate(x, cos, sin), rtol=1e-15, atol=1e-15)


def test_backward_turns_back() -> None:
    """Rotations keep lengths: the gradient of half the squared length is x itself."""
    cos, sin = tables(torch.float64)
    x = torch.randn(B, S, H, K, dtype=torch.float64, requires_grad=True)
    (direct_rotate(x, cos, sin).square().sum() / 2).backward()
    torch.testing.assert_close(x.grad, x.detach(), rtol=1e-14, atol=1e-14)
