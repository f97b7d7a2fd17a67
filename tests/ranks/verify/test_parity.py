"""Every layout that runs equals one float64 process, to 1e-12 over five steps; start values to the bit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.data.batch import IGNORED, Batch
from meshwright.plan.plan import Plan
from meshwright.verify.batches import global_batches
from meshwright.verify.ladder import Rung
from meshwright.verify.rung import RankReport
from meshwright.verify.settings import DOUBLE, OPTIMIZERS, STEPS, optimizer_of
from meshwright.verify.trace import Kind, ReferenceFile
from tests.ranks.verify.parity import Job, check_all, climb, job
from tests.unit.plan.plans import make_plan

SEQUENCES = {1: 16, 2: 16, 3: 12, 4: 16}  # by dp: a multiple of dp x micro for every micro below


def rung(dp: int, micro: int, sequences: int, zero: int = 0, tied: bool = False, pp: int = 1) -> Rung:
    accumulation = sequences // (dp * micro)
    plan = make_plan(dp=dp, pp=pp, micro=micro, accumulation=accumulation, zero=zero, arch={"tie_embeddings": tied})
    plan = replace(
        plan, precision=DOUBLE, optimizer=optimizer_of(OPTIMIZERS[0]), data=replace(plan.data, sequence_length=8)
    )
    return Rung((f"dp {dp} x pp {pp} x micro {micro}, zero {zero}, tied {tied}",), plan)


def untrained(plan: Plan, first: int) -> list[Batch]:
    """Batches without a trained token from sequence `first` on."""
    batches = []
    for batch in global_batches(plan, STEPS):
        labels = batch.labels.copy()
        labels[first:] = IGNORED
        batches.append(replace(batch, labels=labels))
    return batches


@pytest.mark.timeout(170)
def test_data_parallel_layouts_equal_one_process(tmp_path: Path) -> None:
    plain = {ways: [rung(dp, micro, SEQUENCES[dp]) for dp in ways for micro in (1, 2, 4)] for ways in ((1, 2, 4), (3,))}
    sharded = [rung(dp, 2, 12, zero, tied=True) for dp, zero in ((2, 1), (3, 2), (3, 3))]
    sharded.append(rung(2, 2, 12, zero=3, tied=True, pp=2))
    one_empty, all_empty = rung(2, 2, 8), rung(2, 2, 8)
    jobs = [
        *(job(f"dp {ways}", tmp_path, rungs) for ways, rungs in plain.items()),
        job("zero", tmp_path, sharded),
        job("one rank without a trained token", tmp_path, [one_empty], untrained(one_empty.plan, 4)),
        job("no trained token at all", tmp_path, [all_empty], untrained(all_empty.plan, 0)),
    ]
    reports = climb(jobs, 4, timeout=160)
    check_all(jobs, reports)
    _check_empty(jobs[-1], reports[-1][0])


def _check_empty(each: Job, reports: Sequence[Sequence[RankReport]]) -> None:
    for of_rank in reports:
        assert of_rank[0].losses == of_rank[0].norms == (0.0,) * STEPS
        assert of_rank[0].counts == (0,) * STEPS
        assert all(np.isfinite(report.losses).all() for report in of_rank)
    reference = ReferenceFile(each.references[OPTIMIZERS[0]])
    assert reference.figures.largest_of(Kind.GRADIENT) == 0.0
