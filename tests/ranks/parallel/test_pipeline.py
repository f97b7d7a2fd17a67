"""Pipelines equal one process: every schedule, number of stages and micro-batches, tying, ZeRO, tp and recomputation.

The default cases take every value of every axis, and every pair of a schedule with each of them; `prove` takes all.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

from meshwright.config.choices import Recompute, Schedule
from meshwright.plan.folds.ledger import ledger
from meshwright.plan.schedules import Slot, Work
from meshwright.testing.ranks import run_cases
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.logical import check_one_process, train
from tests.ranks.parallel.pipelines import Pipelined, pipeline_of

STEPS = 2
CHUNKS = {Schedule.INTERLEAVED: 2, Schedule.ZB_V: 2}


def equals_one_process(rank: int, case: Pipelined) -> list[float]:
    plan = case.plan
    engine = pipeline_of(plan)
    ran = train(engine, STEPS)
    check_one_process(ran, plan)
    predicted = set(ledger(plan, rank))
    assert all(set(rows) == predicted for rows in ran.rows), (ran.rows[0], predicted)
    return [result.loss for result in ran.results]


def check(world: int, cases: list[Pipelined]) -> None:
    """Every case equals one process, and every rank says the same loss."""
    losses = run_cases(equals_one_process, world, cases, timeout=110)
    assert all(rank == losses[0] for rank in losses)


def staged(pp: int, micros: tuple[int, ...]) -> list[Pipelined]:
    """Every schedule with each number of micro-batches; tying and uneven stages by turns."""
    cases = []
    for turn, (schedule, count) in enumerate(product(Schedule, micros)):
        chunks = CHUNKS.get(schedule, 1)
        uneven = (*[1] * (pp * chunks - 1), 2) if turn % 3 == 0 else (2, *[1] * (pp * chunks - 1))
        recompute = Recompute.FULL if turn % 4 == 1 else Recompute.NONE
        cases.append(Pipelined(schedule, pp, count, chunks, stages=uneven, tied=turn % 2 == 0, recompute=recompute))
    return cases


@pytest.mark.parametrize(
    ("pp", "micros"), [(2, (1, 2, 3, 5, 8)), (3, (2, 5)), pytest.param(4, (3, 8), marks=pytest.mark.prove)]
)
def test_stages_equal_one_process(pp: int, micros: tuple[int, ...]) -> None:
    check(pp, staged(pp, micros))


def test_three_chunks_and_a_stage_of_many_layers() -> None:
    check(2, [Pipelined(Schedule.INTERLEAVED, 2, m, 3, stages=(3, 1, 1, 2, 1, 1), tied=m == 3) for m in (3, 4)])


def test_stages_with_replicas_equal_one_process() -> None:
    cases = []
    for turn, (schedule, zero) in enumerate(product(Schedule, range(4))):
        recompute = Recompute.FULL if turn % 3 == 2 else Recompute.NONE
        chunks, tied = CHUNKS.get(schedule, 1), turn % 2 == (zero > 1)
        cases.append(Pipelined(schedule, 2, 3, chunks, dp=2, zero=zero, tied=tied, recompute=recompute))
    check(4, cases)


def test_stages_with_tensor_parallelism_equal_one_process() -> None:
    check(
        4,
        [
            Pipelined(schedule, 2, 3, CHUNKS.get(schedule, 1), tp=2, sequence=sequence, tied=sequence)
            for schedule in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.ZB_H1, Schedule.ZB_V)
            for sequence in (False, True)
        ],
    )


@pytest.mark.prove
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_all_of_them(pp: int, schedule: Schedule) -> None:
    chunks = CHUNKS.get(schedule, 1)
    even, last = (), (*[1] * (pp * chunks - 1), 3)
    cases = [
        Pipelined(schedule, pp, micros, chunks, stages=stages, tied=tied, recompute=recompute)
        for micros in (1, 2, 3, 5, 8)
        for stages in (even, last)
        for tied in (False, True)
        for recompute in (Recompute.NONE, Recompute.FULL)
    ]
    losses = run_cases(equals_one_process, pp, cases, timeout=1500)
    assert all(rank == losses[0] for rank in losses)


@pytest.mark.prove
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_all_of_them_with_replicas_and_with_tensor_parallelism(pp: int, schedule: Schedule) -> None:
    chunks = CHUNKS.get(schedule, 1)
    recomputed = (Recompute.NONE, Recompute.FULL) if pp == 2 else (Recompute.NONE,)
    replicas = [
        Pipelined(schedule, pp, micros, chunks, dp=2, zero=zero, tied=tied, recompute=recompute, reshard=reshard)
        for micros in (1, 2, 3, 5, 8)
        for zero in range(4)
        for tied in (False, True)
        for recompute in recomputed
        for reshard in ((True, False) if zero == 3 and pp == 2 else (True,))
    ]
    tensors = [
        Pipelined(schedule, pp, micros, chunks, tp=2, sequence=sequence, tied=tied)
        for micros in (1, 2, 3, 5, 8)
        for sequence in (False, True)
        for tied in (False, True)
    ]
    losses = run_cases(equals_one_process, 2 * pp, replicas + tensors, timeout=2900)
    assert all(rank == losses[0] for rank in losses)


def weights_by_stage(stage: int, stages: int, micros: int, chunks: int) -> tuple[Slot, ...]:
    """A schedule of this file: forwards two by two; weight products at once on odd stages, at the end on even ones."""
    order: list[Slot] = []
    late: list[Slot] = []
    for first in range(0, micros, 2):
        pair = range(first, min(first + 2, micros))
        order += [Slot(Work.FORWARD, 0, micro) for micro in pair]
        for micro in pair:
            order.append(Slot(Work.BACKWARD, 0, micro, split=True))
            (order if stage % 2 else late).append(Slot(Work.WEIGHT, 0, micro))
    return (*order, *late)


def runs_a_foreign_schedule(rank: int, case: Pipelined) -> None:
    plan = case.plan
    engine = pipeline_of(plan, weights_by_stage)
    ran = train(engine, STEPS)
    check_one_process(ran, plan)


def test_a_schedule_of_this_file_runs_unchanged() -> None:
    run_cases(runs_a_foreign_schedule, 3, [Pipelined(pp=3, micros=5, tied=tied) for tied in (False, True)])


def evaluates(rank: int, case: Pipelined) -> tuple[float, int]:
    plan = case.plan
    engine = pipeline_of(plan)
    (batch,) = global_batches(plan, 1)
    share = local_share(plan, batch, rank)
    first = engine.evaluate(share)
    loss = engine.step(share, 0.0).loss
    assert engine.evaluate(share) == first, "a step at rate 0 changes nothing"
    assert first.loss_sum / first.trained_tokens == pytest.approx(loss, rel=1e-14)
    return first.loss_sum, first.trained_tokens


def test_evaluation_says_the_training_loss_on_every_rank() -> None:
    cases = [Pipelined(schedule, 2, 3, CHUNKS.get(schedule, 1), dp=2, zero=3, tied=True) for schedule in Schedule]
    results = run_cases(evaluates, 4, cases)
    assert all(rank == results[0] for rank in results)


def keeps_copies_equal(rank: int, case: Pipelined) -> None:
    """After each of ten steps the embedding of the first stage is the head of the last, bit for bit."""
    plan = case.plan
    engine = pipeline_of(plan)
    for batch in global_batches(plan, 10):
        engine.step(local_share(plan, batch, rank), 0.05)
        mine = [s.whole.clone() for s in engine.stores if s.bucket.tied and s.whole.untyped_storage().nbytes()]
        everyone: list[list[torch.Tensor]] = [[] for _ in range(plan.degrees.ranks)]
        dist.all_gather_object(everyone, mine)
        copies = [copy for held in everyone for copy in held]
        assert len(copies) == 2 * plan.degrees.dp
        assert all(torch.equal(copy, copies[0]) for copy in copies)


@pytest.mark.prove
def test_tied_copies_stay_equal_for_ten_steps() -> None:
    """B35 (NVIDIA/Megatron-LM#656): with overlapped reduction the first embedding and the last head drifted apart."""
    run_cases(keeps_copies_equal, 2, [Pipelined(schedule, 2, 2, tied=True) for schedule in (Schedule.ONE_F_ONE_B,)])
    run_cases(keeps_copies_equal, 4, [Pipelined(pp=2, micros=2, dp=2, zero=zero, tied=True) for zero in (0, 1, 2)])
