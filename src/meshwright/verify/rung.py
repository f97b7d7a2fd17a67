"""One rung on one rank: a few steps with SGD and as many with AdamW, compared with the reference piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshwright.comm.mesh import Mesh
from meshwright.config.choices import OptimizerKind
from meshwright.data.batch import Batch
from meshwright.parallel.engine import Engine, StepResult
from meshwright.plan.plan import Plan
from meshwright.verify.bands import rounding_band
from meshwright.verify.batches import global_batches, local_share
from meshwright.verify.probe import Finding, Probe
from meshwright.verify.settings import OPTIMIZERS, RATES, STEPS, compared_after, optimizer_of
from meshwright.verify.trace import Kind, Quantity, ReferenceFile

__all__ = ["RankReport", "climb"]


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank saw of one rung with one optimizer; losses, norms, counts and terms have one entry a step.

    `evaluation` is the mean loss of step 0's batch at the start values; `stale`: weights whose compute copy is not the
    master's value.
    """

    rank: int
    optimizer: OptimizerKind
    evaluation: float
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    counts: tuple[int, ...]
    terms: tuple[tuple[float, ...], ...]
    findings: tuple[Finding, ...]
    strays: tuple[int, ...]
    stale: tuple[Quantity, ...] = ()


def climb(
    plan: Plan, mesh: Mesh, device: torch.device | str, references: dict[OptimizerKind, Path],
    batches: Sequence[Batch] | None = None,
) -> list[RankReport]:  # fmt: skip
    """Run the rung of `plan` on this rank; `mesh` was started and its ranks are those of the plan.

    `references` are folders written by `run_reference` from the same global batches (None: the ladder's own).
    """
    given = global_batches(plan, STEPS) if batches is None else batches
    share = [local_share(plan, batch, mesh.rank) for batch in given]
    return [_train(plan, mesh, device, kind, ReferenceFile(references[kind]), share) for kind in OPTIMIZERS]


def _train(
    plan: Plan, mesh: Mesh, device: torch.device | str, kind: OptimizerKind, reference: ReferenceFile,
    share: Sequence[Batch],
) -> RankReport:  # fmt: skip
    plan = replace(plan, optimizer=optimizer_of(kind))
    band = rounding_band(plan, reference.figures, RATES[kind], len(share))
    engine = Engine(plan, mesh, device)
    probe = Probe(engine, reference, band)
    probe.weights(Kind.START)
    evaluated = engine.evaluate(share[0])
    results = [probe.watch(lambda: engine.step(share[0], RATES[kind]))]
    for done in range(1, len(share) + 1):
        kind_of_weights = compared_after(len(share)).get(done)
        if kind_of_weights is not None:
            probe.weights(kind_of_weights)
        if done < len(share):
            results.append(_taken(engine, share[done], RATES[kind]))
    return RankReport(
        mesh.rank,
        kind,
        evaluated.loss_sum / max(evaluated.trained_tokens, 1),
        tuple(result.loss for result in results),
        tuple(result.grad_norm for result in results),
        tuple(result.trained_tokens for result in results),
        tuple(result.terms for result in results),
        tuple(probe.findings),
        tuple(probe.strays),
        tuple(probe.stale),
    )


def _taken(engine: Engine, batch: Batch, rate: float) -> StepResult:
    """A step whose weights were updated: one that overflowed is taken again, under the loss scale that fell."""
    while (result := engine.step(batch, rate)).overflowed:
        pass
    return result
