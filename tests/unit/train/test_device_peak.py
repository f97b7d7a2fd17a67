"""The peak that MFU is a share of: of the data sheet, or as `doctor --calibrate` measured it; never a guess."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.arch.resolve import arch_from_model
from meshwright.config.choices import Dtype
from meshwright.config.load import build_run
from meshwright.plan.plan import Plan
from meshwright.plan.resolve import resolve
from meshwright.price.calibration import Measured, ProductTime, calibrated
from meshwright.price.catalogue import cluster_of
from meshwright.price.cluster import Cluster
from meshwright.testing.models import m0
from meshwright.train.device_peak import Peak, peak_of

SECONDS = 2 * 512**3 / 5e10


@pytest.fixture
def plan() -> Plan:
    run = build_run(m0(batch={"global": 4}, precision={"compute": "float32"}))
    return resolve(run, arch_from_model(run.model))


@pytest.fixture
def here() -> Cluster:
    """Two ranks at once did 50 GFLOP/s each."""
    products = tuple(ProductTime(dtype, 512, 512, 512, SECONDS) for dtype in ("float32", "float64"))
    return calibrated(Measured(2, "CPU", "cpu", 1e10, 1e10, products))


def flops_of(peak: Peak | None) -> float:
    assert peak is not None
    assert peak.source == "measured"
    return peak.flops_per_s


def test_a_guess_is_no_peak(plan: Plan) -> None:
    assert peak_of(plan, cluster_of("local", calibrated=False), "cpu", ["a"], 1) is None


@pytest.mark.parametrize(
    ("hosts", "threads", "devices"),
    [
        (["a"], 1, 1),
        (["a"], 2, 2),  # one rank with all threads has the machine
        (["a", "a"], 1, 2),
        (["a"] * 8, 1, 2),  # more ranks than were measured share it
        (["a", "a", "b"], 1, 3),
        (["a", "b"], 8, 4),
    ],
)
def test_ranks_share_the_devices_of_their_host(
    plan: Plan, here: Cluster, hosts: list[str], threads: int, devices: int
) -> None:
    assert flops_of(peak_of(plan, here, "cpu", hosts, threads)) == pytest.approx(devices * 5e10)


def test_a_machine_measured_on_another_kind_of_device_says_nothing(plan: Plan, here: Cluster) -> None:
    assert peak_of(plan, here, "cuda", ["a"], 1) is None
    assert peak_of(plan, cluster_of("h100-sxm"), "cpu", ["a"], 1) is None


def test_a_dtype_without_a_rate_has_none(plan: Plan, here: Cluster) -> None:
    lacking = replace(here, device=replace(here.device, matrix_flops={"bfloat16": 1e12}))
    assert peak_of(plan, lacking, "cpu", ["a"], 1) is None


def test_gpus_have_the_peak_of_their_data_sheet(plan: Plan) -> None:
    plan = replace(plan, precision=replace(plan.precision, compute=Dtype.BFLOAT16))
    sheet = cluster_of("h100-sxm")
    assert peak_of(plan, sheet, "cuda", ["a"] * 4, 8) == Peak(4 * sheet.device.matrix_flops["bfloat16"], "stated")
