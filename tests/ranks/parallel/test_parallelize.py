"""A plain decoder made parallel in place: its own weights, trained as one process would."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.checkpoint.held import parameters
from meshwright.model import Decoder, build_decoder, initialise
from meshwright.plan.plan import Plan
from meshwright.testing.ranks import run_cases
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.logical import check_one_process, train, whole
from tests.ranks.parallel.pipelines import Pipelined
from tests.ranks.parallel.test_tensor import Case

LAYOUTS = [
    Case(tp=2, sequence=True, tied=True, kv_heads=1),
    Case(tp=1, dp=2, zero=3),
    Case("gpt2", tp=1, pp=2, accumulation=2, dropout=0.1),
]


def decoder(plan: Plan, seed: int) -> Decoder:
    model = build_decoder(plan.arch, dtype=torch.float64, device="cpu")
    initialise(model, plan.arch, seed)
    return model


def takes_the_models_weights(rank: int, case: Case) -> None:
    plan = case.plan
    mesh = mw.Mesh.of(plan).start()
    expected = {name: each.detach().clone() for name, each in decoder(plan, 7).named_parameters()}
    model = decoder(plan, 7)
    parallel = mw.parallelize(model, plan, mesh)
    assert parallel is model
    found = whole(plan, parameters(parallel.engine))
    assert rank or found.keys() == expected.keys()
    assert rank or all(torch.equal(found[name], values) for name, values in expected.items())
    here = {id(each) for store in parallel.engine.stores for each in store.parameters.values()}
    assert all(each.is_meta != (id(each) in here) for each in model.parameters())
    assert len(here) == len({*model.parameters()}) or case.pp > 1
    with pytest.raises(RuntimeError, match=r"engine\.step"):
        model(torch.zeros(1, 8, dtype=torch.int64), None)
    with pytest.raises(ValueError, match="already"):
        mw.parallelize(model, plan, mesh)
    mesh.close()


def trains_as_one_process(rank: int, case: Case) -> None:
    plan = case.plan
    mesh = mw.Mesh.of(plan).start()
    for seed in (plan.seed, None):  # the model's own values, and the plan's where it has none
        model = build_decoder(plan.arch, dtype=torch.float64) if seed is None else decoder(plan, seed)
        check_one_process(train(mw.parallelize(model, plan, mesh).engine), plan)
    mesh.close()


def refuses_what_is_no_model_of_the_plan(rank: int, case: Case) -> None:
    plan = case.plan
    mesh = mw.Mesh.of(plan).start()
    with pytest.raises(TypeError, match="a Linear has no sharding table"):
        mw.parallelize(nn.Linear(2, 2), plan, mesh)
    with pytest.raises(ValueError, match=r"plan\.arch"):
        mw.parallelize(decoder(Pipelined().plan, 0), plan, mesh)
    with pytest.raises(ValueError, match=r"take Mesh\.of\(plan\)"):
        mesh.check_runs(Pipelined(pp=2).plan)
    with pytest.raises(ValueError, match="the model of rank 1 differs from that of rank 0"):
        mw.parallelize(decoder(plan, rank), plan, mesh)
    model = mw.parallelize(decoder(plan, 3), plan, mesh)
    (batch,) = global_batches(plan, 1)
    assert model.engine.step(local_share(plan, batch, rank), 0.1).finite
    mesh.close()


def test_the_models_own_weights_are_taken() -> None:
    run_cases(takes_the_models_weights, 2, LAYOUTS)


def test_training_equals_one_process() -> None:
    run_cases(trains_as_one_process, 2, LAYOUTS)


def test_anything_else_is_refused() -> None:
    run_cases(refuses_what_is_no_model_of_the_plan, 2, LAYOUTS[:1])
