"""Rank 0 of a model of 70 billion parameters on 512 ranks, on this machine."""

from __future__ import annotations

import resource
import time
from dataclasses import replace

import pytest

from meshwright.arch.catalogue import preset
from meshwright.config.choices import Dtype
from meshwright.layout.axes import Degrees
from meshwright.parallel.dry_run import dry_run
from meshwright.plan.folds.traffic import Transport
from meshwright.plan.plan import Batch, Pipeline, Plan, Precision, Sharding
from meshwright.testing.ranks import run
from tests.unit.plan.plans import make_plan


def plan_of(zero: int) -> Plan:
    arch = preset("llama2-70b")
    return replace(
        make_plan(precision=Precision(Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.FLOAT32)),
        arch=arch,
        data=replace(make_plan().data, sequence_length=4096),
        degrees=Degrees(dp=512),
        batch=Batch(512, 1),
        sharding=Sharding(zero),
        pipeline=Pipeline(stages=(arch.layers,)),
    )


def measured(rank: int, zero: int) -> tuple[bool, bool, float, float, float]:
    """In a process of its own, so that its memory is its own."""
    from meshwright.launch.join import leave

    leave()
    begin = time.perf_counter()
    done = dry_run(plan_of(zero), rank, transport=Transport.NCCL)
    seconds = time.perf_counter() - begin
    gibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return done.traffic_equal, done.states_equal, done.peak_ratio, seconds, gibibytes


@pytest.mark.prove
@pytest.mark.parametrize("zero", [1, 3])
def test_70_billion_parameters_on_512_ranks(zero: int) -> None:
    ((traffic, states, peak, seconds, gibibytes),) = run(measured, 1, zero, timeout=110)
    assert traffic
    assert states
    assert peak == pytest.approx(1, abs=0.01)
    assert seconds < 60
    assert gibibytes < 4
