"""Rounding bands: exact in float64, wide enough for honest rounding, far too narrow for the next lower format."""

import math

import numpy as np
import pytest
import torch

from meshwright.config.choices import Dtype, OptimizerKind
from meshwright.plan.plan import Plan, Precision
from meshwright.verify.bands import EXACT, Band, rounding_band, unit_roundoff
from meshwright.verify.settings import RATES, STEPS, optimizer_of
from meshwright.verify.trace import Figures, Kind
from tests.unit.plan.plans import make_plan

LARGEST = {"weight.0/w": 0.1, "weight.5/w": 0.1, "gradient/w": 0.05}
FIGURES = Figures(5.5, (5.5,) * STEPS, (1.0,) * STEPS, (100,) * STEPS, LARGEST, dict.fromkeys(LARGEST, (1,)))


def plan_in(dtype: Dtype, kind: OptimizerKind = OptimizerKind.SGD) -> Plan:
    master = dtype if dtype is Dtype.FLOAT64 else Dtype.FLOAT32
    return make_plan(dp=2, micro=2, precision=Precision(dtype, master, master), optimizer=optimizer_of(kind))


def band_in(dtype: Dtype, kind: OptimizerKind = OptimizerKind.SGD) -> Band:
    return rounding_band(plan_in(dtype, kind), FIGURES, RATES[kind], STEPS)


def test_float64_is_exact() -> None:
    assert band_in(Dtype.FLOAT64) == EXACT


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16])
def test_unit_roundoff_is_half_of_torchs_epsilon(dtype: Dtype) -> None:
    assert unit_roundoff(dtype) == torch.finfo(getattr(torch, dtype.value)).eps / 2


@pytest.mark.parametrize("kind", [Kind.ACTIVATION, Kind.GRADIENT, Kind.LAST])
def test_a_band_is_below_what_the_next_lower_format_does(kind: Kind) -> None:
    """One operation in bfloat16 inside a float32 run is off by 2^-9 somewhere: it must not pass."""
    assert band_in(Dtype.FLOAT32).of(kind) < unit_roundoff(Dtype.BFLOAT16) / 2
    assert unit_roundoff(Dtype.FLOAT32) < band_in(Dtype.FLOAT32).of(kind)
    assert unit_roundoff(Dtype.BFLOAT16) < band_in(Dtype.BFLOAT16).of(kind) < 0.3


def test_adamw_divides_by_epsilon() -> None:
    sgd, adamw = band_in(Dtype.FLOAT32), band_in(Dtype.FLOAT32, OptimizerKind.ADAMW)
    assert adamw.gradient == sgd.gradient
    assert adamw.update != sgd.update


def test_the_law_of_a_long_sum() -> None:
    """Errors of float32 sums grow as sqrt(n), and 4·sqrt(n)·u of the sum of magnitudes covers them."""
    random = np.random.default_rng(0)
    for size in (256, 4096, 65536):
        products = random.standard_normal((50, size)).astype(np.float32)
        running = np.zeros(50, dtype=np.float32)
        for column in products.T:
            running += column
        error = np.abs(running - products.astype(np.float64).sum(1))
        bound = 4 * math.sqrt(size) * unit_roundoff(Dtype.FLOAT32) * np.abs(products).astype(np.float64).sum(1)
        assert (error < bound).all()
