"""The norm and the update over real ranks, with gradients set by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from meshwright.data.batch import IGNORED
from meshwright.layout.axes import Degrees
from meshwright.parallel.engine import Engine
from meshwright.parallel.store import Store
from meshwright.plan.action import Action, Op
from meshwright.plan.plan import Plan
from meshwright.plan.rules import canonical
from meshwright.testing.ranks import run_cases
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.plain import ADAMW, Case
from tests.ranks.parallel.running import engine_of, weights

CUT, WHOLE = "layers.0.mlp.up.weight", "layers.0.mlp_norm.weight"


def gradient(store: Store, name: str) -> torch.Tensor:
    """The elements of one tensor in the summed gradient of this rank, which is `first`, .. `last` of the bucket."""
    (segment,) = (each for each in store.bucket.segments if each.name == name)
    low, high = (min(max(at, store.first), store.last) - store.first for at in (segment.offset, segment.stop))
    return store.reduced[low:high]


def norm_of_hand_set_gradients(rank: int, plan: Plan) -> float:
    """The gradient is 3 on tensor rank 0 and 4 on tensor rank 1 in one cut matrix, 12 in one whole gain, else 0."""
    engine = engine_of(plan)

    def before(action: Action) -> None:
        if action.op is not Op.NORM:
            return
        for store in engine.stores:
            store.seal()
            store.reduced.zero_()
            names = [segment.name for segment in store.bucket.segments]
            if CUT in names:
                gradient(store, CUT)[:1] = 3.0 + engine.mesh.coordinates.tp
            if WHOLE in names:
                gradient(store, WHOLE)[:1] = 12.0

    engine.observe(before)
    share = local_share(plan, global_batches(plan, 1)[0], rank)
    return engine.step(share, 0.0).grad_norm


def test_replicated_gradients_are_counted_once() -> None:
    """B12: counted on every tensor rank, the norm of 3, 4 and 12 would be 17.69."""
    plan = Case("norm", 1, arch=(("kv_heads", 4),)).plan
    plans = [canonical(replace(plan, degrees=Degrees(tp=2)))]
    plans.append(canonical(replace(plans[0], execution=replace(plans[0].execution, sequence=True))))
    for of_rank in run_cases(norm_of_hand_set_gradients, 2, plans, timeout=90):
        assert of_rank == [13.0, 13.0]


def decayed(rank: int, case: Case) -> list[str]:
    """Names of tensors by what an update without a gradient did to them: the matrix, or the gain, is wrong."""
    engine: Engine = engine_of(case.plan)
    start = weights(engine)
    (batch,) = global_batches(case.plan, 1)
    untrained = replace(batch, labels=batch.labels * 0 + IGNORED)
    result = engine.step(local_share(case.plan, untrained, rank), 0.1)
    assert (result.loss, result.grad_norm, result.trained_tokens) == (0.0, 0.0, 0)
    wrong = []
    for name, tensor in weights(engine).items():
        wanted = start[name] * (0.99 if tensor.dim() >= 2 else 1.0)
        if not torch.allclose(tensor, wanted, rtol=1e-15, atol=0.0):
            wrong.append(name)
    return wrong


def test_decay_is_for_matrices_on_every_layout() -> None:
    """B58: with flat shards a rule about dimensions puts every parameter into one group."""
    optimizer = replace(ADAMW, weight_decay=0.1)
    cases = [Case(f"stage {zero}", 2, zero, optimizer=optimizer) for zero in range(4)]
    for of_rank in run_cases(decayed, 2, cases, timeout=90):
        assert of_rank == [[]] * len(cases)
