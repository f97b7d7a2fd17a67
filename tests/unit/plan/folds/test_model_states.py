"""What ZeRO leaves on a rank, in the arithmetic of its paper (arXiv:1910.02054, section 3).

2 + 2 + 12 bytes a parameter at 16-bit parameters and gradients and float32 Adam; each part divided by the ranks from
its stage on.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.arch.arch import Arch
from meshwright.arch.arithmetic import parameters
from meshwright.arch.catalogue import preset
from meshwright.config.choices import Dtype
from meshwright.layout.axes import Degrees
from meshwright.plan.action import Op
from meshwright.plan.folds.memory import Category, memory
from meshwright.plan.plan import Batch, Pipeline, Plan, Precision, Sharding
from meshwright.plan.program import program
from tests.unit.plan.plans import make_plan

MIXED = Precision(Dtype.BFLOAT16, Dtype.BFLOAT16, Dtype.FLOAT32)
STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER, Category.MASTER)
MILLION = Arch("llama", layers=4, hidden=128, heads=4, kv_heads=4, head_dim=32, ffn=384, vocab=512)


def sharded(arch: Arch, ranks: int, zero: int) -> Plan:
    plan = make_plan(dp=ranks, zero=zero, precision=MIXED)
    return replace(
        plan,
        arch=arch,
        batch=Batch(ranks, 1),
        degrees=Degrees(dp=ranks),
        sharding=Sharding(zero),
        pipeline=Pipeline(stages=(arch.layers,)),
    )


def bytes_at_the_update(plan: Plan) -> float:
    """Parameters, gradients and optimizer of rank 0 when the norm is taken, a parameter."""
    timeline = memory(plan, 0)
    norm = next(i for i, action in enumerate(program(plan, 0).actions) if action.op is Op.NORM)
    live = sum(timeline.states[category] for category in STATES)
    live += sum(e.change for e in timeline.events if e.index <= norm and e.category in STATES)
    return live / parameters(plan.arch)


@pytest.mark.parametrize(("zero", "megabytes"), [(0, 16.0), (1, 7.0), (2, 5.5), (3, 4.0)])
def test_a_million_parameters_on_four_ranks(zero: int, megabytes: float) -> None:
    assert bytes_at_the_update(sharded(MILLION, 4, zero)) == pytest.approx(megabytes, rel=2e-3)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 1120.0), (1, 293.125), (2, 155.3125), (3, 17.5)])
def test_70_billion_parameters_on_64_gpus(zero: int, gigabytes: float) -> None:
    """293 GB at stage 1, not the 15 GB that is often told: parameters and gradients stay whole."""
    plan = sharded(preset("llama2-70b"), 64, zero)
    assert 70 * bytes_at_the_update(plan) == pytest.approx(gigabytes, rel=1e-3)


def test_stage_3_adds_its_gathered_units_to_17_5_gigabytes() -> None:
    """The most that is gathered: the unit in work, the one before it, the one ahead."""
    plan = sharded(preset("llama2-70b"), 64, 3)
    timeline = memory(plan, 0)
    block = max(sum(s.numel for s in bucket.segments) for bucket in program(plan, 0).buckets if 5 in bucket.units)
    gathered = timeline.largest[Category.PARAMETERS] - timeline.states[Category.PARAMETERS]
    assert 2 * block * 2 <= gathered <= 3 * block * 2


def test_float32_gradients_cost_two_bytes_more() -> None:
    plan = replace(sharded(MILLION, 4, 1), precision=replace(MIXED, reduce=Dtype.FLOAT32))
    assert bytes_at_the_update(plan) == pytest.approx(9.0, rel=2e-3)
