"""The engine's RMSNorm against torch's own: values, gradients, and what is kept."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from meshwright.arch.activations import saved_bytes
from meshwright.config.choices import Dtype
from meshwright.parallel.norms import apply_norms
from tests.unit.arch.test_activations import ARCHS, DTYPES, SETTING, saved_by_autograd

TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""A few units in the last place: both round once, from sums in another order."""

SHAPES = {"stream": (96, 512), "heads": (2, 5, 3, 64), "one row": (1, 7)}


def built(size: int, dtype: torch.dtype, trained: bool = True) -> nn.RMSNorm:
    norm = nn.RMSNorm(size, eps=1e-5, dtype=dtype)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    norm.weight.requires_grad_(trained)
    return norm


def results(norm: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """Output and gradients of input and gain."""
    x = x.detach().to(next(norm.parameters()).dtype).requires_grad_()
    y = norm(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *norm.parameters()], g.to(y.dtype))]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_values_and_gradients_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = built(shape[-1], dtype)
    ours = deepcopy(plain)
    apply_norms([ours])
    x, g = (3 * torch.randn(shape) + 0.3).to(dtype), (torch.randn(shape) + 1).to(dtype)  # means that must cancel
    exact = results(deepcopy(plain).double(), x, g)
    for mine, theirs, truth in zip(results(ours, x, g), results(plain, x, g), exact, strict=True):
        assert mine.dtype is theirs.dtype
        for other in (theirs, truth):
            assert float((mine - other).abs().max() / truth.abs().max()) < TOLERANCES[dtype]


def test_a_view_of_joined_heads_is_read_in_place() -> None:
    """Under a tensor axis queries and keys are columns of one product."""
    ours, plain = built(16, torch.float64), built(16, torch.float64)
    plain.load_state_dict(ours.state_dict())
    apply_norms([ours])
    joined = torch.randn(6, 96, dtype=torch.float64)
    x, g = joined[:, 32:64].view(6, 2, 16), torch.randn(6, 2, 16, dtype=torch.float64)
    for mine, theirs in zip(results(ours, x, g), results(plain, x, g), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-14)


def test_a_frozen_gain_has_no_gradient() -> None:
    norm = built(32, torch.float32, trained=False)
    apply_norms([norm])
    x = torch.randn(4, 32, requires_grad=True)
    norm(x).sum().backward()
    assert norm.weight.grad is None
    assert x.grad is not None


def test_a_gain_alone_can_be_trained() -> None:
    norm = built(32, torch.float32)
    apply_norms([norm])
    x, g = torch.randn(4, 32), torch.randn(4, 32)
    norm(x).backward(g)
    expected = (g * nn.functional.rms_norm(x, (32,), eps=1e-5)).sum(0)
    torch.testing.assert_close(norm.weight.grad, expected)


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama, dropout"])
@pytest.mark.parametrize("compute", DTYPES)
def test_units_keep_what_the_table_says_of_fused_norms(compute: Dtype, name: str) -> None:
    arch = ARCHS[name]
    measured = list(saved_by_autograd(arch, compute, documents=None, change=lambda decoder: apply_norms([decoder])))
    fused = replace(SETTING, fused_norms=True)
    assert measured == [saved_bytes(arch, unit, fused, compute) for unit in range(arch.num_units)]


def test_norms_are_replaced_once() -> None:
    norm = built(8, torch.float32)
    apply_norms([norm])
    with pytest.raises(ValueError, match="replaced already"):
        apply_norms([norm])
