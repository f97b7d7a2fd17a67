"""A run's loss normalisation on masks of the user's own.

    labels (G, S)    a global batch as the user's data makes it: -100 where a token is not trained
    rungs            the whole run, trained on these labels on its own layout, against one float64 process
    naive            what the loss would be, were it averaged a rank or a micro-batch at a time, and then over them

Where the naive averages are equal to the true loss, the masks are even and prove nothing: the report says so. Tokens
are made up; only which of them train is the user's. All of it is done in float64.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.config.choices import DeviceKind
from meshwright.config.errors import RequestError
from meshwright.data.batch import IGNORED, Batch
from meshwright.launch.forkserver import start_server
from meshwright.launch.local import run_ranks
from meshwright.layout.groups import GroupName, groups
from meshwright.layout.rows import Integers, whole_rows
from meshwright.model import build_decoder, initialise, rows_to_torch
from meshwright.model.loss import token_losses
from meshwright.plan.plan import Batch as BatchSize
from meshwright.plan.plan import Plan
from meshwright.plan.rules import check_plan
from meshwright.train.machine import check_machine
from meshwright.verify.ladder import ladder
from meshwright.verify.settings import DOUBLE, STEPS
from meshwright.verify.twin import twin
from meshwright.verify.verify import Outcome, climb_here, judge, make_references

__all__ = ["Normalisation", "check_normalisation"]

_TELLING = 1e-6
"""A naive average that is nearer than this to the true loss cannot be told from it."""


@dataclass(frozen=True, slots=True)
class Normalisation:
    """`trained` tokens of each batch rank's micro-batches, (ranks, accumulation); losses in nats a token."""

    outcome: Outcome
    trained: tuple[tuple[int, ...], ...]
    loss: float
    mean_of_ranks: float
    mean_of_micro_batches: float

    @property
    def ok(self) -> bool:
        return self.outcome.ok

    def __str__(self) -> str:
        verdict = "equal to one process" if self.ok else f"DIFFERS: {self.outcome.first}"
        naive = f"a mean of ranks is {self.mean_of_ranks:.9g}, of micro-batches {self.mean_of_micro_batches:.9g}"
        told = naive if self.telling else f"{naive}: these masks are even and prove nothing"
        return f"loss over {sum(map(sum, self.trained))} trained tokens {self.loss:.9g}, {verdict}; {told}"

    @property
    def telling(self) -> bool:
        """Whether a wrong normalisation would have been seen."""
        wrong = (self.mean_of_ranks, self.mean_of_micro_batches)
        return any(abs(each - self.loss) > _TELLING * self.loss for each in wrong)


def check_normalisation(plan: Plan, labels: Integers, *, device: str = "cpu") -> Normalisation:
    """Train a small twin of `plan` on `labels` (G, S), on ranks of this machine, and compare with one process.

    Raises RequestError where the layout cannot cut G sequences, or nothing trains.
    """
    _check_labels(labels)
    small, _ = twin(plan)
    sequences, length = labels.shape
    data, batch = replace(small.data, sequence_length=length), BatchSize(sequences, small.batch.micro)
    small = replace(small, precision=DOUBLE, batch=batch, data=data)
    check_plan(small)
    rung = ladder(small)[-1]
    check_machine(DeviceKind(device), rung.plan.degrees.ranks)
    batches = [_batch(rung.plan, labels, step) for step in range(STEPS)]
    start_server((__name__,))
    with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as folder:
        references = make_references(rung.plan, Path(folder) / "reference", batches)
        reports = run_ranks(climb_here, rung.plan.degrees.ranks, [rung], [references], folder, device, batches)
        outcome = judge(rung, references, [of_rank[0] for of_rank in reports])
    losses, counted = _token_losses(rung.plan, batches[0]), batches[0].labels != IGNORED
    ways = groups(rung.plan.degrees)[GroupName.BATCH].size
    parts = [np.split(each, rung.plan.accumulation) for each in np.split(np.arange(sequences), ways)]
    return Normalisation(
        outcome,
        tuple(tuple(int(counted[micro].sum()) for micro in of_rank) for of_rank in parts),
        float(losses.sum() / counted.sum()),
        _mean_of_means(losses, counted, [np.concatenate(of_rank) for of_rank in parts]),
        _mean_of_means(losses, counted, [micro for of_rank in parts for micro in of_rank]),
    )


def _check_labels(labels: Integers) -> None:
    """Raises RequestError where no batch has such labels, or none of them trains."""
    works = (f"labels (sequences, tokens) with at least one trained token, {IGNORED} where one is not",)
    if labels.ndim != 2 or not labels.size:
        raise RequestError(f"labels of shape {labels.shape}", "must be those of the sequences of a batch", works)
    if not (labels != IGNORED).any():
        raise RequestError(f"labels of shape {labels.shape}", f"are all {IGNORED}: nothing trains", works)
    strange = labels[(labels < 0) & (labels != IGNORED)]
    if strange.size:
        raise RequestError(f"a label of {strange[0]}", "is no token, and would count as trained", works)


def _mean_of_means(losses: Any, counted: Any, parts: list[Any]) -> float:
    """Each part divided by its own trained tokens, then all alike."""
    return float(np.mean([losses[part].sum() / max(int(counted[part].sum()), 1) for part in parts]))


def _batch(plan: Plan, labels: Integers, step: int) -> Batch:
    tokens = np.random.default_rng((plan.seed, step)).integers(0, plan.arch.vocab, (2, *labels.shape), dtype=np.int64)
    samples = step * len(labels) + np.arange(len(labels), dtype=np.int64)
    given = np.where(labels == IGNORED, IGNORED, tokens[1])
    return Batch(tokens[0], given, whole_rows(step, samples, labels.shape[1]))


def _token_losses(plan: Plan, batch: Batch) -> Any:
    """(G, S) float64, by one process and the plain model."""
    model = build_decoder(plan.arch, dtype=torch.float64, device="cpu")
    initialise(model, plan.arch, plan.seed)
    rows = rows_to_torch(batch.rows, plan.arch, seed=plan.seed, dtype=torch.float64)
    with torch.no_grad():
        logits_NV = model(torch.from_numpy(batch.inputs), rows)
        return token_losses(logits_NV, torch.from_numpy(batch.labels).flatten()).view(batch.labels.shape).numpy()
