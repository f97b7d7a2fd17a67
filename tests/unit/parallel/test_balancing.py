"""What the executor does for the load of experts: counts that ride on the norm, biases that move with steps taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.arch.arch import Experts
from meshwright.comm.mesh import Mesh
from meshwright.config.choices import Balance, Recompute
from meshwright.config.errors import RequestError
from meshwright.parallel.engine import Engine
from meshwright.plan.norm import NORM_FLOATS, norm_floats
from meshwright.plan.plan import Execution, Moe, Plan
from meshwright.verify.batches import global_batches
from meshwright.verify.settings import DOUBLE
from tests.unit.plan.plans import make_plan


def plan_of(recompute: Recompute = Recompute.NONE, balance: Balance = Balance.BIAS) -> Plan:
    plan = make_plan(accumulation=2, recompute=recompute, arch={"experts": Experts(8, 2, 32, dense_layers=1)}, layers=3)
    return replace(plan, moe=Moe(balance))


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_choices_are_counted_once_whatever_is_recomputed(recompute: Recompute) -> None:
    """B48: 64 tokens, two choices each, in both routed layers; the dense one counts nothing."""
    plan = plan_of(recompute)
    engine = Engine(plan, Mesh())
    assert engine.balancer is not None
    for batch in global_batches(plan, 2):
        engine.step(batch, 0.1)
        counts = engine._train.packed[NORM_FLOATS:].view(2, 8)
        assert counts.sum(1).tolist() == [128.0, 128.0]
    assert list(engine.balancer.biases) == ["layers.1.mlp.router.bias", "layers.2.mlp.router.bias"]
    assert {round(float(each) * 1000) for bias in engine.balancer.biases.values() for each in bias} <= {-2, -1, 0, 1, 2}
    assert any(bias.any() for bias in engine.balancer.biases.values())


def test_recomputation_changes_no_bias() -> None:
    biases = []
    for recompute in (Recompute.NONE, Recompute.FULL):
        engine = Engine(plan_of(recompute), Mesh())
        for batch in global_batches(engine.plan, 3):
            engine.step(batch, 0.1)
        assert engine.balancer is not None
        biases.append(torch.stack(list(engine.balancer.biases.values())))
    assert torch.equal(*biases)


def test_a_step_that_is_not_taken_moves_no_bias() -> None:
    engine = Engine(plan_of(), Mesh())
    (batch,) = global_batches(engine.plan, 1)
    with torch.no_grad():
        engine.stores[-1].whole.fill_(torch.nan)
    assert not engine.step(batch, 0.1).finite
    assert engine.balancer is not None
    assert not any(bias.any() for bias in engine.balancer.biases.values())


def test_terms_are_told_beside_the_loss() -> None:
    """Of any cut into micro-batches, recomputed or not; at even scores the auxiliary term is 1 a layer."""
    told = []
    for recompute, micro in ((Recompute.NONE, 1), (Recompute.FULL, 1), (Recompute.NONE, 2)):
        plan = plan_of(recompute, Balance.AUXILIARY)
        moe = Moe(Balance.AUXILIARY, auxiliary_loss=0.5, z_loss=0.1)
        engine = Engine(replace(plan, batch=replace(plan.batch, micro=micro), moe=moe, precision=DOUBLE), Mesh())
        (batch,) = global_batches(engine.plan, 1)
        told.append(engine.step(batch, 0.1).terms)
    assert 0.5 * 2 < told[0][0] < 0.5 * 2 * 1.2
    assert told[0][1] > 0
    assert all(each == pytest.approx(told[0], rel=1e-12) for each in told)
    plain = Engine(plan_of(balance=Balance.NONE), Mesh())
    assert plain.step(global_batches(plain.plan, 1)[0], 0.1).terms == ()


def test_only_biases_and_terms_make_the_packed_vector_longer() -> None:
    assert norm_floats(plan_of()) == NORM_FLOATS + 2 * 8
    assert norm_floats(replace(plan_of(), moe=Moe(Balance.BIAS, z_loss=0.1))) == NORM_FLOATS + 2 * 8 + 2
    assert norm_floats(plan_of(balance=Balance.NONE)) == norm_floats(make_plan()) == NORM_FLOATS


def test_what_no_executor_runs_with_experts_is_refused() -> None:
    with pytest.raises(RequestError, match=r"parallel\.compile"):
        Engine(replace(plan_of(), execution=Execution(compile=True)), Mesh())
