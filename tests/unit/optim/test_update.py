"""Update rules, clipping and the loss scale, on a few numbers."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.config.choices import Dtype, OptimizerKind
from meshwright.optim.scale import GROWTH_STEPS, LossScale, loss_scale_for
from meshwright.optim.update import RULES, STATE_NAMES, Run, clip_coefficient, squared_norm
from meshwright.plan.plan import Optimizer

SGD = Optimizer(kind=OptimizerKind.SGD, weight_decay=0.0)


def run_of(values: torch.Tensor, kind: OptimizerKind, decays: bool = True) -> Run:
    state = tuple(torch.zeros_like(values) for _ in STATE_NAMES[kind])
    return Run(values, state, decays, torch.zeros(()))


def test_a_master_takes_steps_that_bfloat16_cannot() -> None:
    master, pure = torch.ones(1), torch.ones(1, dtype=torch.bfloat16)
    runs = [run_of(master, OptimizerKind.SGD)]
    rounded = [run_of(pure, OptimizerKind.SGD)]
    for _ in range(100):
        RULES[OptimizerKind.SGD](SGD, runs, [torch.tensor([6e-4])], 1.0)
        RULES[OptimizerKind.SGD](SGD, rounded, [torch.tensor([6e-4], dtype=torch.bfloat16)], 1.0)
    assert float(master) == pytest.approx(0.94, abs=100 * 2**-24)  # a rounding a step
    assert float(master.bfloat16()) == 0.94140625
    assert float(pure) == 1.0


def test_decay_touches_only_runs_that_decay() -> None:
    settings = Optimizer(weight_decay=0.1)
    matrix, gain = torch.full((4,), 2.0, dtype=torch.float64), torch.full((3,), 2.0, dtype=torch.float64)
    runs = [run_of(matrix, OptimizerKind.ADAMW, decays=True), run_of(gain, OptimizerKind.ADAMW, decays=False)]
    RULES[OptimizerKind.ADAMW](settings, runs, [torch.zeros_like(run.values) for run in runs], 0.1)
    torch.testing.assert_close(matrix, torch.full((4,), 1.98, dtype=torch.float64), rtol=1e-15, atol=0)
    assert gain.tolist() == [2.0] * 3
    assert [float(run.step) for run in runs] == [1.0, 1.0]


def test_adamw_equals_torch() -> None:
    torch.manual_seed(0)
    start, settings = torch.randn(50, dtype=torch.float64), Optimizer(weight_decay=0.1)
    ours, theirs = run_of(start.clone(), OptimizerKind.ADAMW), torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=settings.betas, eps=settings.eps, weight_decay=0.1)
    for _ in range(5):
        gradient = torch.randn(50, dtype=torch.float64)
        theirs.grad = gradient.clone()
        optimizer.step()
        RULES[OptimizerKind.ADAMW](settings, [ours], [gradient], 0.01)
    torch.testing.assert_close(ours.values, theirs.detach(), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(("norm", "limit", "wanted"), [(2.0, 1.0, 1 / 2.000001), (0.5, 1.0, 1.0), (5.0, 0.0, 1.0)])
def test_clipping_as_torch(norm: float, limit: float, wanted: float) -> None:
    assert clip_coefficient(norm, limit) == pytest.approx(wanted, rel=1e-15)


def test_squares_of_halves_are_added_in_float32() -> None:
    values = torch.full((4096,), 300.0, dtype=torch.float16)  # the norm, 19200, fits float16; its square does not
    assert float(squared_norm(values)) == pytest.approx(4096 * 300.0**2)
    assert math.isinf(float(squared_norm(torch.tensor([math.inf]))))


def test_the_norm_of_many_float32_elements_is_right() -> None:
    values = torch.randn(20_000_003, generator=torch.Generator().manual_seed(0))
    exact = float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
    assert float(squared_norm(values)) == pytest.approx(exact, rel=1e-6)
    assert float(squared_norm(values[:0])) == 0.0


def test_the_scale_falls_once_an_overflow_and_grows_after_many_good_steps() -> None:
    scale = LossScale(1024.0, dynamic=True, growth_steps=3)
    bad, good = True, False
    course = [(bad, 512), (good, 512), (good, 512), (bad, 256), (good, 256), (good, 256), (good, 512)]
    for overflowed, value in course:
        scale.after_step(overflowed)
        assert scale.value == value
    floor = LossScale(2.0, dynamic=True)
    floor.after_step(True)
    assert (floor.value, floor.may_fall) == (1.0, False)


def test_only_float16_is_scaled() -> None:
    assert loss_scale_for(Dtype.FLOAT16) == LossScale(65536.0, 0, True, GROWTH_STEPS)
    for dtype in (Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.FLOAT64):
        still = loss_scale_for(dtype)
        still.after_step(False)
        assert (still.value, still.good_steps, still.may_fall) == (1.0, 0, False)
