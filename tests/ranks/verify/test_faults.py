"""The judge judged: faults put into one place of the engine are found, named at the right tensor, and understood.

Each fault lives in the ranks only; the reference is made without it. Two ranks, three micro-batches of two sequences.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from meshwright.comm.operations import Handle
from meshwright.data.batch import Batch
from meshwright.launch.join import leave
from meshwright.launch.meeting import Meeting
from meshwright.model import attention
from meshwright.model.rows import Sight
from meshwright.optim import update
from meshwright.parallel import executor, rotation
from meshwright.parallel.engine import Engine, Evaluation
from meshwright.parallel.executor import Executor
from meshwright.parallel.store import Store
from meshwright.plan.action import Action, What
from meshwright.plan.plan import Plan
from meshwright.testing.ranks import run_cases
from meshwright.verify import rung as rung_module
from meshwright.verify.batches import local_share
from meshwright.verify.ladder import Rung
from meshwright.verify.likely import Cause
from meshwright.verify.rung import RankReport
from meshwright.verify.settings import DOUBLE, OPTIMIZERS, optimizer_of
from meshwright.verify.verify import References, climb_all, judge, make_references
from tests.unit.plan.plans import make_plan

Fault = Callable[[int], Any]
"""(rank) -> a context in which the engine of that rank is faulty."""


def _method(owner: Any, name: str, wrong: Callable[..., Any]) -> Any:
    """`owner.name` replaced by wrong(original, self, ...)."""
    original = getattr(owner, name)
    return patch.object(owner, name, lambda *args: wrong(original, *args))


def no_fault(rank: int) -> Any:
    return contextlib.nullcontext()


def local_count(rank: int) -> Any:
    """Each rank divides by its own tokens."""
    return _method(Executor, "_count", lambda original, self, action: Handle())


def local_evaluation(rank: int) -> Any:
    """Each rank tells the mean over its own sequences."""

    def evaluate(original: Any, self: Engine, batch: Batch) -> Evaluation:
        found = original(self, batch)
        return replace(found, trained_tokens=batch.trained_tokens)

    return _method(Engine, "evaluate", evaluate)


def doubled_evaluation(rank: int) -> Any:
    """A factor that training cancels and evaluation does not."""

    def evaluate(original: Any, self: Engine, batch: Batch) -> Evaluation:
        found = original(self, batch)
        return replace(found, loss_sum=2 * found.loss_sum)

    return _method(Engine, "evaluate", evaluate)


def wrong_slice(rank: int) -> Any:
    """Every rank reads the first slice."""

    def share(plan: Plan, batch: Batch, _rank: int) -> Batch:
        return local_share(plan, batch, 0)

    return patch.object(rung_module, "local_share", share)


def unsummed_block(rank: int) -> Any:
    """The bucket of block 0 is not summed."""

    def summed(original: Any, self: Executor, action: Action) -> Handle:
        if action.what is What.GRADIENT and self.stores[action.bucket].bucket.units == (1,):
            self.stores[action.bucket].seal()
            return Handle()
        return original(self, action)

    return _method(Executor, "_sum", summed)


def _scaled(factor: float) -> Any:
    def summed(original: Any, self: Executor, action: Action) -> Handle:
        if action.what is What.GRADIENT:
            self.stores[action.bucket].seal().mul_(factor)
        return original(self, action)

    return _method(Executor, "_sum", summed)


def averaged(rank: int) -> Any:
    """Gradients are averaged over the replicas although the loss was divided by the global count."""
    return _scaled(1 / 2)


def twice_averaged(rank: int) -> Any:
    """Averaged over the replicas of two and again over the three micro-batches."""
    return _scaled(1 / 6)


def overwritten(rank: int) -> Any:
    """A micro-batch overwrites what the one before left."""

    def backward(original: Any, self: Executor, action: Action) -> None:
        for store in self.stores:
            if action.unit in store.bucket.units:
                store._written.clear()
        original(self, action)

    return _method(Executor, "_backward", backward)


def local_norm(rank: int) -> Any:
    """Each rank clips by the norm of what it counts itself."""

    def norm(original: Any, self: Executor, action: Action) -> Handle:
        original(self, replace(action, group=None))
        return Handle()

    return _method(Executor, "_norm", norm)


def unclipped(rank: int) -> Any:
    return patch.object(executor, "clip_coefficient", lambda norm, limit: 1.0)


def decaying_gains(rank: int) -> Any:
    """AdamW decays norm gains as well."""

    def decays(original: Any, self: Store) -> Any:
        return [replace(run, decays=True) for run in original(self)]

    return _method(Store, "_build_runs", decays)


def sees_the_future(rank: int) -> Any:
    def attend(original: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight) -> torch.Tensor:
        everything = torch.ones(1, 1, q.shape[1], k.shape[1], dtype=torch.bool)
        return original(q, k, v, Sight(everything) if sight.mask is None else sight)

    return _method(attention, "attend", attend)


def unturned_keys(rank: int) -> Any:
    """Queries are rotated, keys (the fewer heads) are not."""

    def rotate(
        original: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return original(q, k, cos, sin)[0], k

    return _method(rotation, "direct_rotate", rotate)


def other_seed(rank: int) -> Any:
    """One tensor starts from another stream of numbers."""
    from meshwright.parallel import store

    def fill(original: Any, out: Any, name: str, seed: int, *rest: Any) -> None:
        original(out, name, seed + (name == "layers.1.mlp.up.weight"), *rest)

    return _method(store, "fill", fill)


def drifting_copy(rank: int) -> Any:
    """Rank 1 alone ends an update one bit off."""

    def publish(original: Any, self: Store, *runs: Any) -> None:
        if rank == 1 and self.bucket.units == (2,) and self.runs and float(self.runs[0].step) > 0:
            first = self.master[:1]
            first.copy_(torch.nextafter(first, first + 1))
        original(self, *runs)

    return _method(Store, "publish_own", publish)


def _changed_gradient(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The gradient of one parameter, summed over the micro-batches, is changed before it is summed over ranks."""

    def seal(original: Any, self: Store) -> torch.Tensor:
        if self._sealed:
            return original(self)
        whole = original(self)
        for segment in self.bucket.segments:
            if segment.name == name:
                view = whole[segment.offset : segment.stop].view(segment.shape)
                view.copy_(change(view))
        return whole

    return _method(Store, "seal", seal)


def rolled_rows(rank: int) -> Any:
    """Rows of one gradient lie one place too far."""
    return _changed_gradient("layers.1.attention.query.weight", lambda gradient: gradient.roll(1, 0))


def single_precision(rank: int) -> Any:
    """The head's gradient passes through float32."""
    return _changed_gradient("head.weight", lambda gradient: gradient.float().double())


def unwritten(rank: int) -> Any:
    """One parameter is cut from the graph."""
    return _changed_gradient("layers.0.attention.value.weight", torch.zeros_like)


def forgotten_state(rank: int) -> Any:
    """AdamW's step count is not kept: bias correction is always the first step's."""

    def stepped(original: Any, settings: Any, runs: Any, gradients: Any, rate: float) -> None:
        for run in runs:
            run.step.zero_()
        original(settings, runs, gradients, rate)

    return patch.dict(update.RULES, {kind: _around(rule, stepped) for kind, rule in update.RULES.items()})


def _around(rule: Any, wrong: Callable[..., Any]) -> Any:
    return lambda *args: wrong(rule, *args)


@dataclass(frozen=True)
class Case:
    name: str
    fault: Fault
    first: str | None
    cause: Cause | None
    text: str = ""


CASES = [
    Case("no fault", no_fault, None, None),
    Case("local count", local_count, "trained tokens", Cause.MISSING_SUM),
    Case("local evaluation", local_evaluation, "evaluation loss", Cause.FACTOR),
    Case("doubled evaluation", doubled_evaluation, "evaluation loss", Cause.FACTOR, "which is dp"),
    Case("wrong slice", wrong_slice, "samples", Cause.ROWS, "read by no rank"),
    Case("unsummed block", unsummed_block, "layers.0.mlp.down.weight", Cause.MISSING_SUM, "dp"),
    Case("averaged", averaged, "head.weight", Cause.FACTOR, "which is 1/dp"),
    Case("twice averaged", twice_averaged, "head.weight", Cause.FACTOR, "which is 1/(dp x accumulation)"),
    Case("overwritten", overwritten, "head.weight", Cause.MISSING_SUM, "a part of a sum is missing"),
    Case("local norm", local_norm, "norm", Cause.FACTOR),
    Case("unclipped", unclipped, "embedding.weight", None),
    Case("decaying gains", decaying_gains, "layers.0.attention_norm.weight", None),
    Case("sees the future", sees_the_future, "layers.0", Cause.MASK, "positions differ, from 0 on"),
    Case("unturned keys", unturned_keys, "layers.0", Cause.MASK, "positions differ, from 1 on"),
    Case("other seed", other_seed, "layers.1.mlp.up.weight", Cause.OTHER),
    Case("drifting copy", drifting_copy, "layers.1.attention.query.weight", Cause.ORDER, "ranks 0 and 1"),
    Case("rolled rows", rolled_rows, "layers.1.attention.query.weight", Cause.ROWS, "row 0 holds what belongs at 63"),
    Case("single precision", single_precision, "head.weight", Cause.PRECISION),
    Case("unwritten", unwritten, "layers.0.attention.value.weight", Cause.UNWRITTEN),
    Case("forgotten state", forgotten_state, "loss", None),
]


def the_rung() -> Rung:
    plan = make_plan(dp=2, micro=2, accumulation=3)
    plan = replace(
        plan, precision=DOUBLE, optimizer=optimizer_of(OPTIMIZERS[0]), data=replace(plan.data, sequence_length=8)
    )
    return Rung(("dp", "accumulation"), plan)


def _faulty(rank: int, case: Case, references: References, folder: str) -> list[RankReport]:
    leave()
    meeting = Meeting.through(Path(folder) / case.name.replace(" ", "-"), rank, 2)
    with case.fault(rank):
        return climb_all(meeting, [the_rung()], [references])[0]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("faults")
    references = make_references(the_rung().plan, folder / "reference")
    results = run_cases(_faulty, 2, CASES, references, str(folder), timeout=110)
    return {
        case.name: judge(the_rung(), references, [of_rank[number] for of_rank in results])
        for number, case in enumerate(CASES)
    }


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fault_is_found_and_named(outcomes: dict[str, Any], case: Case) -> None:
    outcome = outcomes[case.name]
    if case.first is None:
        assert outcome.ok, str(outcome.first)
        return
    assert outcome.first is not None, "the fault was not seen"
    told = str(outcome.first)
    assert outcome.first.name == case.first, told
    assert case.cause is None or outcome.first.likely.cause is case.cause, told
    assert case.text in told, told
