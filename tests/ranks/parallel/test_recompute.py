"""Recomputation, full and selective: the same numbers at every stage, with dropout, and less memory as planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from meshwright.arch.activations import Setting, saved_bytes
from meshwright.config.choices import Dtype, Recompute
from meshwright.plan.action import Op
from meshwright.plan.folds.ledger import ledger
from meshwright.plan.plan import Execution
from meshwright.testing.ranks import run_cases
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.plain import ADAMW, LENGTH, Case, plain_training
from tests.ranks.parallel.running import check_parity, difference, engine_of, train

FULL, SELECTIVE = Execution(recompute=Recompute.FULL), Execution(recompute=Recompute.SELECTIVE)
PLAIN_MLP = (("qkv_bias", True), ("qk_norm", True), ("output_bias", True), ("mlp_bias", True), ("gated", False))


def equals_one_process(rank: int, case: Case) -> None:
    plan = case.plan
    ran = train(engine_of(plan))
    check_parity(ran, plain_training(plan))
    assert all(set(rows) == set(ledger(plan, rank)) for rows in ran.rows)


def test_every_stage_equals_one_process() -> None:
    cases = [
        Case(f"{execution.recompute}, stage {zero}, {acc} micro-batches, dropout {dropout}", 2, zero, acc,
             tied=True, execution=execution, arch=(("dropout", dropout),))
        for execution in (FULL, SELECTIVE)
        for zero in range(4)
        for acc, dropout in ((1, 0.1), (4, 0.0))
    ]  # fmt: skip
    cases.append(Case("kept until backward", 2, 3, 4, reshard=False, execution=SELECTIVE))
    cases.append(Case("biases and norms of heads", 2, 3, 4, execution=SELECTIVE, arch=PLAIN_MLP))
    run_cases(equals_one_process, 2, cases, timeout=110)


def bits_are_equal(rank: int, case: Case) -> None:
    """In float32, with dropout: what is computed twice is computed alike."""
    plain = train(engine_of(replace(case, execution=Execution()).plan))
    again = train(engine_of(case.plan))
    assert again.results[0].loss == plain.results[0].loss
    if case.execution == FULL:
        assert [result.loss for result in again.results] == [result.loss for result in plain.results]
        assert difference(again.gradients, plain.gradients) == 0.0
    else:  # gradients of an input that several products read are added in another order
        assert difference(again.gradients, plain.gradients) < 1e-5


def test_dropout_falls_alike_the_second_time() -> None:
    single = replace(ADAMW, clip_norm=0.0)
    cases = [
        Case(f"{execution.recompute}", 2, 3, 2, optimizer=single, execution=execution, arch=(("dropout", 0.3),))
        for execution in (FULL, SELECTIVE)
    ]
    cases = [replace(case, precision=type(case.precision)()) for case in cases]
    run_cases(bits_are_equal, 2, cases)


def kept_bytes(rank: int, case: Case) -> Any:
    """Bytes that the forward of block 1 keeps for backward, without parameters, rows and tokens."""
    plan = case.plan
    engine = engine_of(plan)
    batch = local_share(plan, global_batches(plan, 1)[0], rank)
    block, kept = engine.model.units[1], {}
    alive = {parameter.untyped_storage().data_ptr() for parameter in engine.model.parameters() if not parameter.is_meta}
    forward = block.forward

    def watched(x: torch.Tensor, rows: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return forward(x, rows)
        own = {getattr(rows, name).untyped_storage().data_ptr() for name in ("cos", "sin", "token_keys")}
        kept[x.untyped_storage().data_ptr()] = x

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            place = tensor.untyped_storage().data_ptr()
            if place not in alive and place not in own:
                kept[place] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return forward(x, rows)

    block.forward = watched
    engine.step(batch, 0.0)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_selective_keeps_what_the_table_says() -> None:
    cases = [
        Case(f"{execution.recompute}, {dropout}", 2, 1, 1, execution=execution, arch=(("dropout", dropout),))
        for execution in (Execution(), SELECTIVE)
        for dropout in (0.0, 0.1)
    ]
    cases.append(Case("not gated", 2, 1, 1, execution=SELECTIVE, arch=PLAIN_MLP))
    for measured in run_cases(kept_bytes, 2, cases):
        for case, found in zip(cases, measured, strict=True):
            selective = case.execution == SELECTIVE
            setting = Setting(case.plan.batch.micro, LENGTH, fused_norms=True, selective=selective)
            assert found == saved_bytes(case.plan.arch, 1, setting, Dtype.FLOAT64), case.name


def test_programs_say_what_is_run_again() -> None:
    from meshwright.plan.program import program

    plan = Case("full", 2, 3, 2, execution=FULL).plan
    again = [action for action in program(plan, 0).actions if action.op is Op.RECOMPUTE]
    assert len(again) == plan.arch.layers * plan.accumulation
    plan = Case("selective", 2, 3, 2, execution=SELECTIVE).plan
    assert not any(action.op is Op.RECOMPUTE for action in program(plan, 0).actions)
