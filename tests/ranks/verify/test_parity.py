"""Every layout that runs equals one float64 process, to 1e-12 over five steps; start values to the bit."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.checkpoint.fingerprint import fingerprint
from meshwright.data.batch import IGNORED, Batch
from meshwright.launch.join import leave
from meshwright.layout.fingerprint import add
from meshwright.layout.moves import Piece, owned
from meshwright.layout.rectangles import full
from meshwright.plan.plan import Plan
from meshwright.testing.ranks import run
from meshwright.verify.batches import global_batches
from meshwright.verify.ladder import Rung
from meshwright.verify.rung import OPTIMIZERS, RankReport
from meshwright.verify.settings import DOUBLE, STEPS, optimizer_of
from meshwright.verify.trace import Kind, ReferenceFile
from meshwright.verify.verify import References, climb_all, judge, make_references
from tests.unit.plan.plans import make_plan

SEQUENCES = {1: 16, 2: 16, 3: 12, 4: 16}  # by dp: a multiple of dp x micro for every micro below


@dataclass(frozen=True)
class Job:
    """Rungs that share their global batches and a reference."""

    name: str
    rungs: Sequence[Rung]
    batches: Sequence[Batch]
    references: References
    folder: str


def rung(dp: int, micro: int, sequences: int, zero: int = 0, tied: bool = False, pp: int = 1) -> Rung:
    accumulation = sequences // (dp * micro)
    plan = make_plan(dp=dp, pp=pp, micro=micro, accumulation=accumulation, zero=zero, arch={"tie_embeddings": tied})
    plan = replace(
        plan, precision=DOUBLE, optimizer=optimizer_of(OPTIMIZERS[0]), data=replace(plan.data, sequence_length=8)
    )
    return Rung((f"dp {dp} x pp {pp} x micro {micro}, zero {zero}, tied {tied}",), plan)


def job(name: str, folder: Path, rungs: Sequence[Rung], batches: Sequence[Batch] | None = None) -> Job:
    given = global_batches(rungs[0].plan, STEPS) if batches is None else batches
    references = make_references(rungs[0].plan, folder / name, given)
    meeting = folder / f"{name}-ranks"
    meeting.mkdir()
    return Job(name, rungs, given, references, str(meeting))


def untrained(plan: Plan, first: int) -> list[Batch]:
    """Batches without a trained token from sequence `first` on."""
    batches = []
    for batch in global_batches(plan, STEPS):
        labels = batch.labels.copy()
        labels[first:] = IGNORED
        batches.append(replace(batch, labels=labels))
    return batches


def _climb(rank: int, jobs: Sequence[Job]) -> list[list[list[RankReport]]]:
    leave()  # each rung joins a group of its own size
    return [
        climb_all(rank, job.rungs, [job.references] * len(job.rungs), job.folder, batches=job.batches) for job in jobs
    ]


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
    results = run(_climb, 4, jobs, timeout=160)
    for number, each in enumerate(jobs):
        for place, one in enumerate(each.rungs):
            reports = [of_rank[number][place] for of_rank in results if of_rank[number][place]]
            _check(each, one, reports)
    _check_empty(jobs[-1], [of_rank[-1][0] for of_rank in results if of_rank[-1][0]])


def _check(each: Job, one: Rung, reports: Sequence[Sequence[RankReport]]) -> None:
    outcome = judge(one, each.references, reports)
    assert outcome.ok, f"{each.name}, {one.name}: {outcome.first}"
    for figure in (outcome.loss, outcome.gradient, outcome.norm, outcome.update):
        assert figure <= 1e-12
    assert len(reports) == one.plan.degrees.ranks
    _check_start(each, one, reports)


def _check_start(each: Job, one: Rung, reports: Sequence[Sequence[RankReport]]) -> None:
    """Owned pieces' fingerprints add up to the whole tensor's: start values are equal to the bit on every layout."""
    reference = ReferenceFile(each.references[OPTIMIZERS[0]])
    layout: dict[int, list[Piece]] = defaultdict(list)
    digests: dict[tuple[int, Piece], int] = {}
    for of_rank in reports:
        for finding in of_rank[0].findings:
            if finding.quantity.kind is Kind.START:
                piece = Piece(finding.quantity.name, finding.rectangle)
                layout[of_rank[0].rank].append(piece)
                digests[of_rank[0].rank, piece] = finding.digest
    sums: dict[str, list[int]] = defaultdict(list)
    for rank, pieces in owned(layout).items():
        for piece in pieces:
            sums[piece.tensor].append(digests[rank, piece])
    for name, parts in sums.items():
        shape = reference.figures.shapes[f"{Kind.START}/{name}"]
        whole = reference.read(Kind.START, Piece(name, full(shape)))
        assert add(parts) == fingerprint(whole, full(shape)), f"{one.name}: start value of {name}"
    assert len(sums) == sum(key.startswith(f"{Kind.START}/") for key in reference.figures.shapes)


def _check_empty(each: Job, reports: Sequence[Sequence[RankReport]]) -> None:
    for of_rank in reports:
        assert of_rank[0].losses == of_rank[0].norms == (0.0,) * STEPS
        assert of_rank[0].counts == (0,) * STEPS
        assert all(np.isfinite(report.losses).all() for report in of_rank)
    reference = ReferenceFile(each.references[OPTIMIZERS[0]])
    assert reference.figures.largest_of(Kind.GRADIENT) == 0.0
