"""Compute, reduction and master dtypes apart; decisions about overflow and NaN taken once for all ranks."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.config.choices import Dtype
from meshwright.parallel.engine import Engine
from meshwright.parallel.store import Store
from meshwright.plan.action import Action, Op
from meshwright.plan.plan import Precision
from meshwright.testing.ranks import run_cases
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.pipelines import Pipelined, pipeline_of
from tests.ranks.parallel.plain import ADAMW, SGD, Case, plain_training
from tests.ranks.parallel.running import difference, engine_of, masters, train, weights

BF16 = Precision(Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.FLOAT32)
FP16 = Precision(Dtype.FLOAT16, Dtype.FLOAT32, Dtype.FLOAT32)


def on_both(function: Any, cases: list[Case], *args: Any) -> list[list[Any]]:
    return run_cases(function, 2, cases, *args, timeout=90)


# ---------------------------------------------------------------- masters


def follows_plain_training(rank: int, case: Case) -> None:
    engine = engine_of(case.plan)
    ran, plain = train(engine), plain_training(case.plan)
    for store in engine.stores:
        assert store.compute is not torch.float32
        assert store.master.dtype is torch.float32
        assert {state.dtype for run in store.runs for state in run.state} <= {torch.float32}
    assert all(tensor.dtype is torch.float32 for tensor in ran.gradients[0].values())
    bound = 0.05 if case.precision.compute is Dtype.BFLOAT16 else 0.01  # of rounding, 2^-8 and 2^-11 an operation
    assert abs(ran.results[0].loss / plain.losses[0] - 1) < bound / 10
    assert abs(ran.results[0].grad_norm / plain.norms[0] - 1) < bound
    scale = {name: float(tensor.abs().max()) for name, tensor in plain.gradients[0].items()}
    for name, tensor in ran.gradients[0].items():
        factor = 65536.0 if case.precision.compute is Dtype.FLOAT16 else 1.0
        assert float((tensor.double() / factor - plain.gradients[0][name]).abs().max()) < bound * scale[name], name
    exact, rounded = masters(engine), weights(engine)
    assert all(torch.equal(exact[name].to(rounded[name].dtype), rounded[name]) for name in exact)
    assert all(result.finite and not result.overflowed for result in ran.results)


def test_low_precision_with_masters_follows_float64() -> None:
    cases = [
        Case(f"{precision.compute}, stage {zero}", 2, zero, accumulation, precision=precision)
        for precision, accumulation in ((BF16, 4), (FP16, 1))
        for zero in range(4)
    ]
    on_both(follows_plain_training, cases)


def agrees_between_stages(rank: int, case: Case) -> list[dict[str, torch.Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these have no master, which is told elsewhere
        return train(engine_of(case.plan), steps=2).weights


def test_every_combination_of_dtypes_runs_and_no_stage_changes_it() -> None:
    combinations = [
        Precision(Dtype.BFLOAT16, Dtype.BFLOAT16, Dtype.FLOAT32),
        Precision(Dtype.BFLOAT16, Dtype.BFLOAT16, Dtype.BFLOAT16),
        Precision(Dtype.FLOAT16, Dtype.FLOAT16, Dtype.FLOAT32),
        Precision(Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.FLOAT64),
        Precision(Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT32),
        Precision(Dtype.FLOAT32, Dtype.FLOAT32, Dtype.FLOAT64),
    ]
    # Clipping is off: stages add up the squares of the norm in different orders.
    cases = [
        Case(f"{p}, stage {zero}", 2, zero, precision=p, optimizer=replace(ADAMW, clip_norm=0.0))
        for p in combinations
        for zero in range(4)
    ]
    found = on_both(agrees_between_stages, cases)[0]
    for first in range(0, len(cases), 4):
        for other in found[first + 1 : first + 4]:
            assert difference(other, found[first]) == 0.0, cases[first].name


def moves_norm_gains(rank: int, case: Case) -> float:
    engine = engine_of(case.plan)
    batches = global_batches(case.plan, 50)
    for batch in batches:
        engine.step(local_share(case.plan, batch, rank), 1e-3)
    gains = torch.cat([tensor for name, tensor in masters(engine).items() if "norm" in name])
    return float((gains != 1.0).float().mean())


def test_norm_gains_move() -> None:
    (moved, *_), *_ = on_both(moves_norm_gains, [Case("bf16", 2, 3, precision=BF16)])
    assert moved > 0.99


def sums_in_float32(rank: int, case: Case) -> list[float]:
    engine = engine_of(case.plan)
    store = engine.stores[-1]
    segment = store.bucket.segments[0]
    parameter = store.parameters[segment.name]
    for _ in range(512):
        parameter.grad = torch.ones_like(parameter)
        store.collect([segment.name])
    flat: list[float] = store.gradient[segment.offset : segment.stop].unique().tolist()
    return flat


def test_512_gradients_of_one_are_512() -> None:
    wide = Case("float32 sums", 2, 0, precision=BF16)
    narrow = Case("bfloat16 sums", 2, 0, precision=Precision(Dtype.BFLOAT16, Dtype.BFLOAT16, Dtype.FLOAT32))
    assert on_both(sums_in_float32, [wide, narrow])[0] == [[512.0], [256.0]]


def test_low_precision_without_a_master_is_told() -> None:
    from meshwright.comm.mesh import Mesh

    pure = Case("bf16 alone", 1, precision=Precision(Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.BFLOAT16))
    with pytest.warns(UserWarning, match="precision.master"):
        Engine(pure.plan, Mesh())


# ---------------------------------------------------------------- overflow and NaN


def poison(engine: Engine, store: Store, value: float) -> None:
    """Put `value` into this rank's gradient just before the first sum of a step."""
    done = []

    def before(action: Action) -> None:
        ready = store.gradient.numel() and store.gradient.untyped_storage().nbytes()
        if action.op is Op.SUM and action.bucket == store.bucket.index and ready and not done:
            done.append(action)
            store.gradient[3] = value

    engine.observe(before)


def skips_together(rank: int, case: Case) -> list[Any]:
    """Step 2 has an infinity on rank 1. Returns what each step said, and that step 2 left the weights alone."""
    plan = case.plan
    engine = engine_of(plan)
    engine.loss_scale.growth_steps = 3
    told = []
    for step, batch in enumerate(global_batches(plan, 6)):
        before = weights(engine)
        if step == 2 and rank == 1:
            poison(engine, engine.stores[1], math.inf)
        result = engine.step(local_share(plan, batch, rank), 0.01)
        engine.observe(None)
        moved = difference([weights(engine)], [before]) > 0
        steps = {float(run.step) for store in engine.stores for run in store.runs}
        told.append((result.finite, result.overflowed, result.loss_scale, moved, steps))
    return told


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    cases = [Case(f"stage {zero}", 2, zero, 2, precision=FP16) for zero in range(4)]
    good = (True, False)
    start = 2.0**16
    wanted = [
        (*good, start, True, {1.0}),
        (*good, start, True, {2.0}),
        (True, True, start / 2, False, {2.0}),
        (*good, start / 2, True, {3.0}),
        (*good, start / 2, True, {4.0}),
        (*good, start, True, {5.0}),
    ]
    for of_rank in on_both(skips_together, cases):
        assert of_rank == [wanted] * 4


def skips_on_its_own_piece(rank: int, case: Pipelined) -> list[Any]:
    """Step 2 has an infinity in a gradient that rank 1 alone holds: of its stage, or of its heads."""
    engine, told = pipeline_of(case.plan), []
    for step, batch in enumerate(global_batches(case.plan, 4)):
        before = [store.master.clone() for store in engine.stores]
        if step == 2 and rank == 1:
            spoil(engine)
        result = engine.step(local_share(case.plan, batch, rank), 0.01)
        engine.observe(None)
        moved = [not torch.equal(store.master, held) for store, held in zip(engine.stores, before, strict=True)]
        steps = {float(run.step) for store in engine.stores for run in store.runs}
        told.append((result.finite, result.overflowed, result.loss_scale, all(moved), any(moved), steps))
    return told


def spoil(engine: Engine) -> None:
    """An infinity in this rank's first piece of a gradient that is cut, or is its stage's alone, before the norm."""

    def before(action: Action) -> None:
        if action.op is Op.NORM:
            store = next(s for s in engine.stores if any("mlp.up" in segment.name for segment in s.bucket.segments))
            (segment,) = (each for each in store.bucket.segments if "mlp.up" in each.name)
            store.reduced[segment.offset - store.first] = math.inf

    engine.observe(before)


def test_an_overflow_on_one_stage_or_one_tensor_rank_skips_the_step_on_all() -> None:
    """B21 (hpcaitech/ColossalAI#1175): the rank that overflowed left out a collective, and the others waited in it."""
    sgd = replace(SGD, clip_norm=0.5)
    cases = [Pipelined(precision=FP16, optimizer=sgd), Pipelined(precision=FP16, optimizer=sgd, pp=1, tp=2)]
    cases.append(replace(cases[1], sequence=True))
    start = 2.0**16
    wanted = [
        (True, False, start, True, True, {1.0}),
        (True, False, start, True, True, {2.0}),
        (True, True, start / 2, False, False, {2.0}),
        (True, False, start / 2, True, True, {3.0}),
    ]
    for of_rank in on_both(skips_on_its_own_piece, cases):
        assert of_rank == [wanted] * len(cases)


def test_an_infinity_that_no_scale_explains_is_nonfinite() -> None:
    cases = [Case(f"stage {zero}", 2, zero, 2, optimizer=ADAMW) for zero in range(4)]
    for of_rank in on_both(skips_together, cases):
        for told in of_rank:
            assert [(each[0], each[3]) for each in told] == [(True, True)] * 2 + [(False, False)] + [(True, True)] * 3
            assert not any(each[1] for each in told)


def same_update_whatever_the_scale(rank: int, case: Case) -> list[Any]:
    out = []
    for scale in (2.0**16, 2.0**10):
        engine = engine_of(case.plan)
        engine.loss_scale.value = scale
        ran = train(engine, steps=1)
        out.append((ran.results[0].grad_norm, ran.weights[0]))
    return out


def test_the_scale_leaves_norm_clipping_and_update_alone() -> None:
    """A power of two moves exponents only: equal to the bit unless a number leaves float16's range."""
    case = Case("fp16", 2, 2, 2, precision=FP16, optimizer=replace(SGD, clip_norm=0.5))
    ((first, second),), *_ = on_both(same_update_whatever_the_scale, [case])
    assert first[0] == pytest.approx(second[0], rel=1e-3)
    assert difference([first[1]], [second[1]]) < 2e-3
