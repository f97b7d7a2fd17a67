"""Labels that do not count: a rank, a micro-batch, a whole batch without a trained token, on every layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.data.batch import IGNORED, Batch
from meshwright.parallel.engine import Engine
from meshwright.testing.ranks import run_cases
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.plain import RATE, SEQUENCES, SGD
from tests.ranks.parallel.test_tensor import Case

LAYOUTS = [
    Case(tp=1, dp=2, accumulation=3), Case(tp=1, dp=2, zero=2, accumulation=2), Case(tp=1, dp=2, zero=3),
    Case(tp=2, accumulation=2), Case(tp=2, sequence=True), Case(tp=1, pp=2, accumulation=3),
]  # fmt: skip
MASKS = {
    "a rank": slice(SEQUENCES // 2, SEQUENCES),
    "a micro-batch": slice(0, SEQUENCES // 3),
    "all but five tokens": slice(1, SEQUENCES),
    "all": slice(0, SEQUENCES),
}


@dataclass(frozen=True)
class Result:
    loss: float
    grad_norm: float
    trained: int
    eval_loss: float
    weights: tuple[Tensor, Tensor]
    """Sums over the pieces held here, before the step and after it."""


def batch_of(case: Case, mask: str) -> Batch:
    (batch,) = global_batches(case.plan, 1)
    labels = batch.labels.copy()
    labels[MASKS[mask]] = IGNORED
    if mask == "all but five tokens":
        labels[0, 5:] = IGNORED
    return replace(batch, labels=labels)


def stepped(rank: int, case: Case) -> list[Result]:
    """One SGD step and one evaluation of each mask, on fresh weights."""
    plan = replace(case.plan, optimizer=SGD)
    mesh = Mesh.of(plan).start()
    found = []
    for mask in MASKS:
        engine = Engine(plan, mesh)
        share = local_share(plan, batch_of(case, mask), rank)
        before, evaluated = sums(engine), engine.evaluate(share)
        result = engine.step(share, RATE)
        assert result.finite
        eval_loss = evaluated.loss_sum / max(evaluated.trained_tokens, 1)
        found.append(Result(result.loss, result.grad_norm, result.trained_tokens, eval_loss, (before, sums(engine))))
    mesh.close()
    return found


def sums(engine: Engine) -> Tensor:
    return torch.stack([store.master.double().sum() for store in engine.stores])


@pytest.fixture(scope="module")
def ran() -> dict[str, list[list[Result]]]:
    """Layout -> results by rank and mask."""
    results = run_cases(stepped, 2, LAYOUTS, timeout=110)
    return {case.name: [of_rank[number] for of_rank in results] for number, case in enumerate(LAYOUTS)}


@pytest.fixture(scope="module")
def alone() -> list[Result]:
    return stepped(0, Case(tp=1))


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_what_is_not_trained_weighs_nothing_on_any_layout(
    case: Case, ran: dict[str, list[list[Result]]], alone: list[Result]
) -> None:
    """B02 (OLMo-core#657): a rank without a label divided by its own count, and the sum over ranks was NaN."""
    for of_rank in ran[case.name]:
        for mask, ours, theirs in zip(MASKS, of_rank, alone, strict=True):
            assert ours.trained == theirs.trained
            for figure in ("loss", "grad_norm", "eval_loss"):
                assert getattr(ours, figure) == pytest.approx(getattr(theirs, figure), rel=1e-12, abs=0), (mask, figure)


def test_one_process_counts_what_is_trained(alone: list[Result]) -> None:
    counts = [each.trained for each in alone]
    assert counts == [int((batch_of(Case(tp=1), mask).labels != IGNORED).sum()) for mask in MASKS]
    assert counts[0] < counts[1]
    assert counts[2:] == [5, 0]
    for each in alone[:3]:
        assert each.loss == pytest.approx(math.log(101), abs=0.3)  # of a vocabulary of 101, untrained
        assert each.grad_norm > 0


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_a_batch_without_a_trained_token_changes_nothing(case: Case, ran: dict[str, list[list[Result]]]) -> None:
    for of_rank in ran[case.name]:
        nothing = of_rank[-1]
        assert (nothing.loss, nothing.grad_norm, nothing.trained, nothing.eval_loss) == (0.0, 0.0, 0, 0.0)
        assert np.array_equal(*nothing.weights)
        assert all(not np.array_equal(*each.weights) for each in of_rank[:-1])
