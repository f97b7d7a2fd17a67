"""Pipelines equal one process: every schedule, number of stages and micro-batches, tying, ZeRO and recomputation."""

from __future__ import annotations

import pytest

from meshwright.config.choices import Recompute, Schedule
from meshwright.plan.folds.ledger import ledger
from meshwright.testing.ranks import run_cases
from tests.ranks.parallel.pipelines import Pipelined, pipeline_of, train
from tests.ranks.parallel.plain import plain_training
from tests.ranks.parallel.running import check_parity

STEPS = 2
PLAIN = (Schedule.NAIVE, Schedule.GPIPE, Schedule.ONE_F_ONE_B)


def equals_one_process(rank: int, case: Pipelined) -> list[float]:
    plan = case.plan
    with pipeline_of(plan) as engine:
        ran = train(engine, STEPS)
        check_parity(ran, plain_training(plan, STEPS))
        predicted = set(ledger(plan, rank))
        assert all(set(rows) == predicted for rows in ran.rows), (ran.rows[0], predicted)
        return [result.loss for result in ran.results]


def check(world: int, cases: list[Pipelined]) -> None:
    """Every case equals one process, and every rank says the same loss."""
    losses = run_cases(equals_one_process, world, cases, timeout=110)
    assert all(rank == losses[0] for rank in losses)


def matrix(pp: int) -> list[Pipelined]:
    cases = [
        Pipelined(schedule, pp, micros, tied=tied)
        for schedule in PLAIN
        for micros in (1, 2, 3, 5, 8)
        for tied in (False, True)
    ]
    uneven = (*range(1, pp), 4)
    cases += [Pipelined(schedule, pp, 3, stages=uneven, recompute=Recompute.FULL) for schedule in PLAIN]
    return cases


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_stages_equal_one_process(pp: int) -> None:
    check(pp, matrix(pp))


def test_stages_with_replicas_equal_one_process() -> None:
    check(
        4,
        [
            Pipelined(schedule, 2, 3, dp=2, zero=zero, tied=tied, recompute=recompute)
            for schedule in PLAIN
            for zero in range(4)
            for tied, recompute in ((False, Recompute.NONE), (True, Recompute.NONE), (True, Recompute.FULL))
        ],
    )


SPLIT = (Schedule.INTERLEAVED, Schedule.ZB_H1, Schedule.ZB_V)


def test_chunks_and_split_backwards_equal_one_process() -> None:
    chunks = {Schedule.INTERLEAVED: 2, Schedule.ZB_V: 2}
    check(
        2,
        [
            Pipelined(schedule, 2, micros, chunks.get(schedule, 1), tied=tied, recompute=recompute)
            for schedule in SPLIT
            for micros in (1, 2, 3, 5, 8)
            for tied, recompute in ((False, Recompute.NONE), (True, Recompute.FULL))
        ],
    )
