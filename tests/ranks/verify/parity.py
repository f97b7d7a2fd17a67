"""Rungs that share a reference, climbed by the ranks of one launch, and what a test asks of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from meshwright.checkpoint.fingerprint import fingerprint
from meshwright.data.batch import Batch
from meshwright.launch.join import leave
from meshwright.launch.meeting import Meeting
from meshwright.layout.fingerprint import add
from meshwright.layout.moves import Piece, owned
from meshwright.layout.rectangles import full
from meshwright.testing.ranks import run
from meshwright.verify.batches import global_batches
from meshwright.verify.ladder import Rung
from meshwright.verify.rung import RankReport
from meshwright.verify.settings import OPTIMIZERS, STEPS
from meshwright.verify.trace import Kind, ReferenceFile
from meshwright.verify.verify import References, climb_all, judge, make_references


@dataclass(frozen=True)
class Job:
    """Rungs that share their global batches and a reference."""

    name: str
    rungs: Sequence[Rung]
    batches: Sequence[Batch]
    references: References
    folder: str


FEW = 3
"""Steps enough to tell the first from those after it: moments, biases, buffers that are used again."""


def job(
    name: str, folder: Path, rungs: Sequence[Rung], batches: Sequence[Batch] | None = None, steps: int = STEPS
) -> Job:
    given = global_batches(rungs[0].plan, steps) if batches is None else batches
    references = make_references(rungs[0].plan, folder / name, given)
    meeting = folder / f"{name}-ranks"
    meeting.mkdir()
    return Job(name, rungs, given, references, str(meeting))


def climb(jobs: Sequence[Job], ranks: int, timeout: float) -> list[list[list[list[RankReport]]]]:
    """Reports by job, rung and rank; ranks that a rung does not need are left out."""
    results = run(_climb, ranks, jobs, timeout=timeout)
    return [
        [[of_rank[number][place] for of_rank in results if of_rank[number][place]] for place in range(len(job.rungs))]
        for number, job in enumerate(jobs)
    ]


def check_all(jobs: Sequence[Job], reports: Sequence[Sequence[Sequence[Sequence[RankReport]]]]) -> None:
    for job, of_job in zip(jobs, reports, strict=True):
        for one, of_rung in zip(job.rungs, of_job, strict=True):
            check(job, one, of_rung)


def _climb(rank: int, jobs: Sequence[Job]) -> list[list[list[RankReport]]]:
    world = dist.get_world_size()
    leave()  # each rung joins a group of its own size
    meeting = Meeting.through(Path(jobs[0].folder) / "meeting", rank, world)
    return [climb_all(meeting, job.rungs, [job.references] * len(job.rungs), batches=job.batches) for job in jobs]


def check(each: Job, one: Rung, reports: Sequence[Sequence[RankReport]]) -> None:
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
