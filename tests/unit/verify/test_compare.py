"""Judging: one rank's honest report, and what is told when something in it is not as it should be."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from meshwright.arch.resolve import arch_from_model
from meshwright.comm.mesh import Mesh
from meshwright.config.load import build_run
from meshwright.optim import update
from meshwright.optim.update import Run
from meshwright.plan.resolve import resolve
from meshwright.testing.models import m0
from meshwright.verify.ladder import Rung
from meshwright.verify.likely import Cause
from meshwright.verify.rung import RankReport, climb
from meshwright.verify.settings import DOUBLE, OPTIMIZERS, optimizer_of
from meshwright.verify.trace import Kind
from meshwright.verify.verify import Outcome, References, Report, judge, make_references
from tests.unit.plan.plans import make_plan

PLAN = replace(make_plan(micro=4), precision=DOUBLE, optimizer=optimizer_of(OPTIMIZERS[0]))
RUNG = Rung((), PLAN)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[References, list[RankReport]]:
    references = make_references(PLAN, Path(tmp_path_factory.mktemp("compare")))
    return references, climb(PLAN, Mesh.of(PLAN).start(), "cpu", references)


def judged(honest: tuple[References, list[RankReport]], **changes: object) -> Outcome:
    references, (sgd, adamw) = honest
    return judge(RUNG, references, [[replace(sgd, **changes), adamw]])  # type: ignore[arg-type]


def test_an_honest_rank_passes(honest: tuple[References, list[RankReport]]) -> None:
    outcome = judged(honest)
    assert outcome.ok
    assert max(outcome.loss, outcome.gradient, outcome.norm, outcome.update) < 1e-14


def test_elements_that_no_rank_holds(honest: tuple[References, list[RankReport]]) -> None:
    kept = tuple(f for f in honest[1][0].findings if f.quantity.name != "layers.1.mlp.gate.weight")
    first = judged(honest, findings=kept).first
    assert first is not None
    assert (first.name, first.likely.cause) == ("layers.1.mlp.gate.weight", Cause.UNWRITTEN)
    assert first.likely.text == "8192 of 8192 elements are on no rank"


def test_the_first_in_order_of_execution_is_named(honest: tuple[References, list[RankReport]]) -> None:
    """An activation before a loss, a loss before a gradient, gradients from the head down, weights last."""
    reports = honest[1]
    wrong_loss = (reports[0].losses[0] * 2, *reports[0].losses[1:])
    late_loss = (*reports[0].losses[:4], 9.0)
    first = judged(honest, losses=wrong_loss).first
    assert first is not None
    assert str(first).startswith("loss, of step 0 on rank 0: off by 1; a factor of 2")
    dropped = [f for f in reports[0].findings if f.quantity.kind is Kind.GRADIENT]
    for name in ("embedding.weight", "layers.0.mlp.down.weight"):
        dropped = [f for f in dropped if f.quantity.name != name]
    others = [f for f in reports[0].findings if f.quantity.kind is not Kind.GRADIENT]
    first = judged(honest, findings=(*others, *dropped), losses=late_loss).first
    assert first is not None
    assert (first.name, first.what) == ("layers.0.mlp.down.weight", "gradient")
    first = judged(honest, losses=late_loss).first
    assert first is not None
    assert (first.name, first.what) == ("loss", "of step 4")


def test_samples_and_counts_come_first(honest: tuple[References, list[RankReport]]) -> None:
    reports = honest[1]
    first = judged(honest, strays=(99, 7), losses=(0.0,) * 5).first
    assert first is not None
    assert first.likely.text == "samples [7, 99] do not belong to the step"
    first = judged(honest, counts=(1, *reports[0].counts[1:]), losses=(0.0,) * 5).first
    assert first is not None
    assert first.name == "trained tokens"


def test_json_has_no_infinity(honest: tuple[References, list[RankReport]]) -> None:
    outcome = judged(honest, norms=(math.nan,) * 5)
    assert outcome.first is not None
    assert outcome.first.likely.cause is Cause.NONFINITE
    told = Report(PLAN, "", (outcome,)).to_json()
    assert told["ok"] is False
    assert told["rungs"][0]["norm"] is None
    assert told["rungs"][0]["first"] == "norm"
    json.dumps(told, allow_nan=False)


def test_what_routers_add_is_compared(tmp_path: Path) -> None:
    model = {"family": "mixtral", "experts": 4, "experts_per_token": 2, "layers": 1}
    run = build_run(m0(model=model, mesh={"dp": 1}, precision={"compute": "float64"}, moe={"z_loss": 0.1}))
    plan = replace(resolve(run, arch_from_model(run.model)), optimizer=optimizer_of(OPTIMIZERS[0]))
    references = make_references(plan, tmp_path)
    sgd, adamw = climb(plan, Mesh.of(plan).start(), "cpu", references)
    assert judge(Rung((), plan), references, [[sgd, adamw]]).ok
    for place, name in enumerate(("auxiliary loss", "z loss")):
        told = [list(terms) for terms in sgd.terms]
        told[0][place] *= 2
        wrong = replace(sgd, terms=tuple(map(tuple, told)))
        first = judge(Rung((), plan), references, [[wrong, adamw]]).first
        assert first is not None
        assert (first.name, first.likely.text) == (name, "a factor of 2")


def test_a_factor_of_an_update_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the weights themselves it would be none."""
    references = make_references(PLAN, tmp_path)
    monkeypatch.setitem(update.RULES, OPTIMIZERS[0], _half_as_far)
    first = judge(RUNG, references, [climb(PLAN, Mesh.of(PLAN).start(), "cpu", references)]).first
    assert first is not None
    assert (first.name, first.what) == ("embedding.weight", "weight after step 0")
    assert first.likely.text == "a factor of 0.5"


def _half_as_far(settings: object, runs: Sequence[Run], gradients: Sequence[Tensor], rate: float) -> None:
    for run, gradient in zip(runs, gradients, strict=True):
        run.values.add_(gradient, alpha=-rate / 2)
