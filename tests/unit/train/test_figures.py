"""Figures of steps: MFU by its stated convention, remaining time over remaining steps, constant memory."""

import pytest

from meshwright.arch.resolve import arch_from_model
from meshwright.config.load import build_run
from meshwright.observe.progress import reading_line
from meshwright.parallel.engine import StepResult
from meshwright.plan.plan import Plan
from meshwright.plan.resolve import resolve
from meshwright.testing.models import m0
from meshwright.train.device_peak import Peak
from meshwright.train.figures import Meter

RESULT = StepResult(loss=2.0, grad_norm=1.0, trained_tokens=100, finite=True)


@pytest.fixture
def plan() -> Plan:
    run = build_run(m0(batch={"global": 4}))
    return resolve(run, arch_from_model(run.model))


def test_model_flops_count_the_causal_half(plan: Plan) -> None:
    """M0: 6 x 90112 matmul parameters + 24576 of attention a token."""
    assert Meter(plan, 1).model_flops == 565_248 * 4 * 32


def test_mfu(plan: Plan) -> None:
    flops = 565_248 * 4 * 32
    assert Meter(plan, 10).line(0, RESULT, 1e-3, 2.0, 0)["mfu"] is None
    meter = Meter(plan, 10, Peak(float(flops), "measured"))
    line = meter.line(0, RESULT, 1e-3, 2.0, 0)
    assert line["mfu"] == 0.5
    told = reading_line(meter.reading(line, 0.0))
    assert "MFU 50.0% (6N + causal attention, of the measured peak)" in told


def test_remaining_time_is_of_the_remaining_steps_without_the_first(plan: Plan) -> None:
    meter = Meter(plan, 10)
    first = meter.line(0, RESULT, 1e-3, 50.0, 0)
    assert meter.reading(first, 0.0).eta_seconds is None
    for step in range(1, 4):
        line = meter.line(step, RESULT, 1e-3, 2.0, 0)
    assert meter.reading(line, 5.0).eta_seconds == 6 * 2.0 + 5.0


def test_nothing_is_kept_of_old_steps(plan: Plan) -> None:
    meter = Meter(plan, 5000)
    for step in range(2000):
        meter.line(step, RESULT, 1e-3, 2.0 if step < 1900 else 1.0, 0)
    assert meter.step_seconds == 1.0
    assert all(not hasattr(value, "__len__") or len(value) <= 50 for value in vars(meter).values())
