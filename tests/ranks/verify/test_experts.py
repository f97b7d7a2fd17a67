"""Models with experts equal one float64 process, to 1e-12, on every layout that runs them, however loads are evened.

Their biases are compared like weights: moved by counts of one rank, stage or micro-batch they would go another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.arch.arch import Experts
from meshwright.config.choices import Balance, Documents, Offload, Recompute, Schedule
from meshwright.parallel.dry_run import dry_run
from meshwright.plan.plan import Moe
from meshwright.plan.rules import canonical, check_plan
from meshwright.verify.ladder import Rung
from meshwright.verify.settings import DOUBLE, OPTIMIZERS, optimizer_of
from tests.ranks.verify.parity import check_all, climb, job
from tests.unit.plan.plans import make_plan

SEQUENCES, LENGTH = 12, 8
TERMS = Moe(Balance.AUXILIARY, auxiliary_loss=0.5, z_loss=0.1)
"""Coefficients under which the router's gradient is made of the terms as much as of the loss."""
BIAS = Moe(Balance.BIAS)
SHARED = Experts(4, 2, 12, shared=1, normalise=False, dense_layers=1)
FULL = Recompute.FULL


def rung(
    moe: Moe,
    *,
    layers: int = 2,
    micro: int = 0,
    experts: Experts | None = None,
    sequence: bool = False,
    offload: Offload = Offload.NONE,
    **layout: Any,
) -> Rung:
    """mixtral, or with `experts` qwen3_moe of masked documents; two or three micro-batches where `micro` is 0."""
    shares = layout.get("dp", 1) * layout.get("ep", 1)
    micro = micro or (2 if shares > 1 else 4)
    arch = {"hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 24, "vocab": 67, "dropout": 0.1}
    arch |= {"experts": experts or Experts(4, 2, 12), "qk_norm": experts is not None}
    accumulation = SEQUENCES // (shares * micro)
    plan = make_plan(layers=layers, micro=micro, accumulation=accumulation, arch=arch, **layout)
    documents = Documents.MASKED if experts is not None else Documents.PACKED
    plan = replace(
        plan,
        arch=replace(plan.arch, family="mixtral" if experts is None else "qwen3_moe"),
        data=replace(plan.data, sequence_length=LENGTH, documents=documents),
        precision=DOUBLE,
        optimizer=optimizer_of(OPTIMIZERS[0]),
        execution=replace(plan.execution, sequence=sequence, offload=offload),
        moe=moe,
    )
    plan = canonical(plan)
    check_plan(plan)
    return Rung((f"{layout}, micro {micro}, sequence {sequence}",), plan)


def data_parallel(moe: Moe) -> Sequence[Rung]:
    return (
        rung(moe),
        rung(moe, dp=3),
        rung(moe, dp=2, zero=1),
        rung(moe, dp=3, zero=2, recompute=FULL),
        rung(moe, dp=4, micro=1, zero=3, within=2),
    )


def pipelines(moe: Moe) -> Sequence[Rung]:
    four: dict[str, Any] = {"layers": 4, "pp": 2}
    return (
        rung(moe, **four, schedule=Schedule.ONE_F_ONE_B, dp=2, micro=1, zero=3, recompute=FULL),
        rung(moe, **four, schedule=Schedule.ZB_H1),
        rung(moe, **four, schedule=Schedule.ZB_V, chunks=2, tp=2, sequence=True),
    )


def tensor(moe: Moe) -> Sequence[Rung]:
    return rung(moe, tp=2), rung(moe, tp=4, sequence=True), rung(moe, tp=2, dp=2, zero=1, recompute=FULL)


def check(rungs: dict[str, Sequence[Rung]], folder: Path, timeout: float, ranks: int = 4) -> None:
    jobs = [job(name.replace(" ", "-"), folder, each) for name, each in rungs.items()]
    check_all(jobs, climb(jobs, ranks, timeout))


@pytest.mark.timeout(170)
def test_experts_on_some_layouts(tmp_path: Path) -> None:
    shared = [rung(TERMS, experts=SHARED), rung(TERMS, experts=SHARED, tp=2, dp=2)]
    rungs = {
        "terms": [*data_parallel(TERMS)[2:4], tensor(TERMS)[2]],
        "bias": [data_parallel(BIAS)[1], tensor(BIAS)[1]],
        "terms, four layers": [pipelines(TERMS)[2]],
        "bias, four layers": [pipelines(BIAS)[0]],
        "shared": shared,
    }
    check(rungs, tmp_path, timeout=160)


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moe", [TERMS, BIAS], ids=["terms", "bias"])
def test_experts_on_all_layouts(tmp_path: Path, moe: Moe) -> None:
    schedules = [(each, 1) for each in (Schedule.NAIVE, Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZB_H1)]
    schedules += [(Schedule.INTERLEAVED, 2), (Schedule.ZB_V, 2)]
    four = [rung(moe, layers=4, pp=2, schedule=schedule, chunks=chunks) for schedule, chunks in schedules]
    rungs = {
        "two layers": [*data_parallel(moe), *tensor(moe)],
        "four layers": [*four, *pipelines(moe)],
        "shared": [rung(moe, experts=SHARED, dp=2, zero=2), rung(moe, experts=SHARED, pp=2, schedule=Schedule.ZB_H1)],
    }
    check(rungs, tmp_path, timeout=580)


DRY: list[dict[str, Any]] = [
    {"dp": 2, "zero": 3}, {"pp": 2, "schedule": Schedule.ZB_H1}, {"tp": 2}, {"ep": 2, "dp": 2, "zero": 3},
    {"ep": 4, "tp": 2},
]  # fmt: skip


@pytest.mark.parametrize("layout", DRY, ids=str)
def test_a_dry_run_takes_even_loads_as_the_forecast_does(layout: dict[str, Any]) -> None:
    arch = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "experts": Experts(8, 2, 192), "vocab": 512}
    plan = make_plan(layers=4, micro=4, accumulation=4, arch=arch, **layout)
    plan = canonical(replace(plan, data=replace(plan.data, sequence_length=128), moe=BIAS))
    dry = dry_run(plan, plan.degrees.ranks - 1)
    assert dry.traffic_equal
    assert dry.states_equal
    assert abs(dry.peak_ratio - 1) <= 0.005
