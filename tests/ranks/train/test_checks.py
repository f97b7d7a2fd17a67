"""Ranks that do not do one thing together are stopped before they train on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from meshwright.comm.gather import gather_integers, gather_text
from meshwright.comm.mesh import Mesh
from meshwright.launch.status import RankStatus
from meshwright.plan.action import Phase
from meshwright.plan.folds.traffic import Operation, Transfer
from meshwright.testing.ranks import run, run_cases
from meshwright.train import loop
from meshwright.train.account import LedgerError
from meshwright.train.checks import DisagreementError, check_batches, check_same_run
from meshwright.train.job import Job
from meshwright.train.loop import train_joined
from meshwright.verify.batches import global_batches
from tests.ranks.train.jobs import tiny_job


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except (DisagreementError, LedgerError) as error:
        return str(error)
    return ""


def met(rank: int, case: str, job: Job) -> str:
    """The message of a check, on this rank."""
    plan = job.plan
    mesh = Mesh.of(plan).start()
    (batch,) = global_batches(plan, 1)
    if case == "gather":
        assert gather_integers(mesh, [rank, 1 << 62]) == [[0, 1 << 62], [1, 1 << 62]]
        assert gather_text(mesh, "é" * rank) == ["", "é"]
        return ""
    if case == "other samples" and rank == 1:
        batch = replace(batch, inputs=np.roll(batch.inputs, 1, axis=0))
    if case in ("samples", "other samples"):
        return _raised(lambda: check_batches(mesh, plan, batch))
    corpus = "beef" * 8 if case == "other corpus" and rank == 1 else "cafe" * 8
    other = replace(plan, seed=7) if case == "other plan" and rank == 1 else plan
    return _raised(lambda: check_same_run(mesh, other, corpus))


def test_one_batch_a_model_parallel_group_one_plan_one_corpus(tmp_path: Path) -> None:
    """Ranks of one tensor-parallel group used to read different samples, and trained on nonsense."""
    cases = ["gather", "samples", "other samples", "same run", "other plan", "other corpus"]
    job = tiny_job(tmp_path, 2, mesh={"dp": 1, "tp": 2})
    here, there = run_cases(met, 2, cases, job)
    assert here == there
    told = dict(zip(cases, here, strict=True))
    assert told["samples"] == told["same run"] == ""
    assert told["other samples"] == "ranks 0 and 1 share batch coordinate 0 but read different samples"
    assert told["other plan"].startswith("the plan (math) differs: rank 1 has ")
    assert told["other corpus"].startswith("the corpus differs: rank 1 has ")


def sends_more(rank: int, job: Job) -> str:
    """Train while rank 1 sends once more than its plan says."""
    plain = loop.take_account

    def account(engine, *rest):  # type: ignore[no-untyped-def]
        if rank == 1:
            group = engine.mesh.ledger.rows[0].group
            engine.mesh.ledger.record(Transfer(group, 2, Operation.BROADCAST, Phase.FORWARD, 8))
        return plain(engine, *rest)

    loop.take_account = account
    try:
        return _raised(lambda: train_joined(RankStatus(), job))
    finally:
        loop.take_account = plain


def test_strict_fails_a_run_that_sends_what_was_not_predicted(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, 2, track={"strict": True})
    told = run(sends_more, 2, job)
    assert told[0] == told[1]
    assert told[0].endswith("track.strict is on")
