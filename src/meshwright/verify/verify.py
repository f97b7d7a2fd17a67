"""The whole ladder: references in this process, then all rungs on one set of ranks, then the verdicts.

    this process     twin -> rungs -> references on disk            -> compare
    ranks                                               \\-> rung 0, rung 1, .. /

Ranks are started once. Each rung joins a process group of exactly its own size, and leaves it; ranks that a rung does
not need wait. Under a launcher the ranks are there already: `verify.launched`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.comm.mesh import Mesh
from meshwright.config.choices import DeviceKind, Dtype, OptimizerKind
from meshwright.data.batch import Batch
from meshwright.launch.environment import Place
from meshwright.launch.forkserver import start_server
from meshwright.launch.local import run_ranks
from meshwright.launch.meeting import Meeting
from meshwright.launch.status import RankStatus
from meshwright.plan.plan import Plan
from meshwright.train.machine import check_machine
from meshwright.verify.bands import EXACT, Band, rounding_band
from meshwright.verify.batches import global_batches
from meshwright.verify.compare import Comparison, Verdict, compare
from meshwright.verify.ladder import Rung, ladder
from meshwright.verify.reference import run_reference
from meshwright.verify.rung import RankReport, climb
from meshwright.verify.settings import DOUBLE, OPTIMIZERS, RATES, STEPS, optimizer_of
from meshwright.verify.trace import ReferenceFile
from meshwright.verify.twin import twin

__all__ = [
    "Outcome",
    "References",
    "Report",
    "climb_all",
    "climb_here",
    "judge",
    "judge_all",
    "make_references",
    "references_of",
    "verify",
]

References = dict[OptimizerKind, Path]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A rung's verdict: the worse of its two optimizers in every figure."""

    rung: Rung
    band: Band
    loss: float
    gradient: float
    norm: float
    update: float
    worst: str
    first: Verdict | None

    @property
    def ok(self) -> bool:
        return self.first is None


@dataclass(frozen=True, slots=True)
class Report:
    plan: Plan
    """What was verified: the run's plan, or its twin."""
    twin: str
    """How the twin differs; empty where it is the run itself."""
    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        return all(outcome.ok for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """The object of `verify --json`; figures that are infinite are given as null."""
        return {"ok": self.ok, "rungs": [_row(outcome) for outcome in self.outcomes], "tolerance": EXACT.gradient}


def verify(plan: Plan, *, device: str = "auto", say: Callable[[str], None] = lambda text: None) -> Report:
    """Climb the ladder of `plan` on ranks of this machine.

    `device` is "cpu", "cuda" or "auto": CUDA where each rank has a device. `say` receives a line now and then. Raises
    RequestError where the machine cannot take the ranks, LaunchError where one fails: the message names the rung.
    """
    small, told = twin(plan)
    rungs = ladder(small)
    world = max(rung.plan.degrees.ranks for rung in rungs)
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() >= world else "cpu"
    check_machine(DeviceKind(device), world)
    if told:
        say(told)
    say(f"{len(rungs)} rungs on up to {world} ranks; optimizer and precision are the ladder's own")
    start_server((__name__,))  # its imports run beside the references
    with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as folder:
        references = [references_of(rung.plan, Path(folder)) for rung in rungs]
        reports = run_ranks(climb_here, world, rungs, references, folder, device)
        return Report(small, told, judge_all(rungs, references, reports))


def judge_all(
    rungs: Sequence[Rung], references: Sequence[References], reports: Sequence[list[list[RankReport]]]
) -> tuple[Outcome, ...]:
    """The verdicts on all rungs from what `climb_all` returned on each rank."""
    return tuple(
        judge(rung, references[number], [of_rank[number] for of_rank in reports if of_rank[number]])
        for number, rung in enumerate(rungs)
    )


def judge(rung: Rung, references: References, reports: Sequence[Sequence[RankReport]]) -> Outcome:
    """The verdict on one rung from the reports of its ranks, each with one entry an optimizer."""
    comparisons: list[Comparison] = []
    band = EXACT
    for number, kind in enumerate(OPTIMIZERS):
        figures = ReferenceFile(references[kind]).figures
        plan = replace(rung.plan, optimizer=optimizer_of(kind))
        band = rounding_band(plan, figures, RATES[kind], len(figures.losses))
        comparisons.append(compare(plan, [of_rank[number] for of_rank in reports], figures, band))
    first = next((each.first for each in comparisons if each.first is not None), None)
    worst = max(comparisons, key=lambda each: max(each.gradient, each.update))
    return Outcome(
        rung,
        band,
        loss=max(each.loss for each in comparisons),
        gradient=max(each.gradient for each in comparisons),
        norm=max(each.norm for each in comparisons),
        update=max(each.update for each in comparisons),
        worst=worst.worst,
        first=first,
    )


def make_references(plan: Plan, folder: Path, batches: Sequence[Batch] | None = None) -> References:
    """Train the plan's model in this process with each optimizer, in float64; write what happened below `folder`."""
    made = {}
    for kind in OPTIMIZERS:
        own = replace(plan, optimizer=optimizer_of(kind), precision=DOUBLE)
        given = global_batches(own, STEPS) if batches is None else batches
        made[kind] = folder / kind.value
        run_reference(own, given, RATES[kind], made[kind])
    return made


def references_of(plan: Plan, folder: Path) -> References:
    """The references of a rung below `folder`, made where they are not there: equal model and batches share one."""
    own = replace(plan, precision=DOUBLE)
    place = folder / own.math
    if place.is_dir():
        return {kind: place / kind.value for kind in OPTIMIZERS}
    return make_references(own, place)


def climb_all(
    meeting: Meeting, rungs: Sequence[Rung], references: Sequence[References], device: str = "cpu", *,
    batches: Sequence[Batch] | None = None, at: Callable[[str], None] = lambda phase: None,
) -> list[list[RankReport]]:  # fmt: skip
    """Every rung in turn on this rank, which is in no process group; an empty list where a rung does without it.

    `at` hears which rung is climbed; `batches` as in `climb`.
    """
    reports: list[list[RankReport]] = []
    for rung, of_rung in zip(rungs, references, strict=True):
        at(f"rung {rung.name}")
        with meeting.group(rung.plan.degrees.ranks) as member:
            mesh = Mesh.of(rung.plan)
            reports.append(climb(rung.plan, mesh.start(), device, of_rung, batches) if member else [])
    return reports


def climb_here(
    place: Place, status: RankStatus, rungs: Sequence[Rung], references: Sequence[References], folder: str,
    device: str = "cpu", batches: Sequence[Batch] | None = None,
) -> list[list[RankReport]]:  # fmt: skip
    """`climb_all` as a rank of this machine, started by `run_ranks`; the ranks meet through a file in `folder`."""
    meeting = Meeting.through(Path(folder) / "meeting", place.rank, place.world, device)
    return climb_all(meeting, rungs, references, device, batches=batches, at=lambda phase: status.at(None, phase))


def _row(outcome: Outcome) -> dict[str, Any]:
    plan, first = outcome.rung.plan, outcome.first
    degrees, sharding = plan.degrees, plan.sharding
    row: dict[str, Any] = {
        "name": outcome.rung.name,
        "mesh": {"dp": degrees.dp, "tp": degrees.tp, "pp": degrees.pp, "cp": degrees.cp, "ep": degrees.ep},
        "parallel": {
            "zero": sharding.stage,
            "zero_shard_within": sharding.within,
            "reshard_after_forward": sharding.reshard_after_forward,
            "bucket_bytes": sharding.bucket_bytes,
            "sequence": plan.execution.sequence,
            "schedule": plan.pipeline.schedule.value,
            "chunks": plan.pipeline.chunks,
            "stages": list(plan.pipeline.stages),
            "context": plan.context.kind.value,
            "context_inner": plan.context.inner,
            "recompute": plan.execution.recompute.value,
            "offload": plan.execution.offload.value,
            "compile": plan.execution.compile,
        },
        "batch": {"global": plan.batch.sequences, "micro": plan.batch.micro},
        "ok": outcome.ok,
        "loss": _finite(outcome.loss),
        "gradient": _finite(outcome.gradient),
        "norm": _finite(outcome.norm),
        "update": _finite(outcome.update),
        "worst": outcome.worst,
        "first": first.name if first else None,
        "likely": str(first) if first else None,
    }
    if plan.precision.compute is not Dtype.FLOAT64:
        band = outcome.band
        row["precision"] = plan.precision.compute.value
        row["band"] = {"loss": band.loss, "gradient": band.gradient, "norm": band.norm, "update": band.update}
    return row


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
