"""The precision rung on one rank: the loss scale of float16, and masters that must reach what computes."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.comm.mesh import Mesh
from meshwright.config.choices import Dtype
from meshwright.optim import scale
from meshwright.parallel.store import Store
from meshwright.plan.plan import Plan, Precision
from meshwright.verify.ladder import Rung
from meshwright.verify.likely import Cause
from meshwright.verify.rung import climb
from meshwright.verify.settings import OPTIMIZERS, optimizer_of
from meshwright.verify.verify import Outcome, References, judge, make_references
from tests.unit.plan.plans import make_plan


def plan_in(compute: Dtype) -> Plan:
    precision = Precision(compute, Dtype.FLOAT32, Dtype.FLOAT32)
    return replace(make_plan(micro=4), precision=precision, optimizer=optimizer_of(OPTIMIZERS[0]))


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return make_references(plan_in(Dtype.FLOAT32), Path(tmp_path_factory.mktemp("references")))


def outcome(compute: Dtype, references: References) -> Outcome:
    plan = plan_in(compute)
    return judge(Rung((), plan), references, [climb(plan, Mesh.of(plan).start(), "cpu", references)])


@pytest.mark.parametrize("compute", [Dtype.FLOAT16, Dtype.BFLOAT16])
def test_an_honest_rank_passes(compute: Dtype, references: References) -> None:
    found = outcome(compute, references)
    assert found.ok, found.first
    assert found.gradient > 1e-6  # it did compute in a lower precision


def test_steps_that_overflow_are_taken_again(monkeypatch: pytest.MonkeyPatch, references: References) -> None:
    monkeypatch.setattr(scale, "START", 2.0**24)
    found = outcome(Dtype.FLOAT16, references)
    assert found.ok, found.first


@pytest.mark.parametrize("decaying", [True, False])
def test_an_update_that_does_not_reach_what_computes(
    decaying: bool, monkeypatch: pytest.MonkeyPatch, references: References
) -> None:
    """Gains move by little more than bfloat16 rounds, so no band would tell; those of layer 0 stay where they were."""

    def publish(store: Store, runs: object = None) -> None:
        for low, high, decays in store._spans():
            if decays is not decaying:
                store.own_parameters()[low:high].copy_(store.master[low:high])

    monkeypatch.setattr(Store, "publish_own", publish)
    first = outcome(Dtype.BFLOAT16, references).first
    assert first is not None
    assert first.likely.cause is Cause.STALE
    assert first.name == ("embedding.weight" if decaying else "layers.1.attention_norm.weight")


def test_a_master_that_begins_rounded(monkeypatch: pytest.MonkeyPatch, references: References) -> None:
    """What computes is right then, and no band is as narrow as the rounding of a start value."""
    initialise = Store.initialise

    def from_what_computes(store: Store) -> None:
        initialise(store)
        store.master.copy_(store.own_parameters())

    monkeypatch.setattr(Store, "initialise", from_what_computes)
    first = outcome(Dtype.BFLOAT16, references).first
    assert first is not None
    assert (first.name, first.what, first.likely.cause) == ("embedding.weight", "start value", Cause.STALE)


@pytest.mark.parametrize(("value", "cause"), [(0.5, Cause.FACTOR), (float("nan"), Cause.NONFINITE)])
def test_what_is_far_off_is_not_called_stale(
    value: float, cause: Cause, monkeypatch: pytest.MonkeyPatch, references: References
) -> None:
    initialise = Store.initialise

    def otherwise(store: Store) -> None:
        initialise(store)
        store.master.mul_(value)
        store.own_parameters().mul_(value)

    monkeypatch.setattr(Store, "initialise", otherwise)
    first = outcome(Dtype.BFLOAT16, references).first
    assert first is not None
    assert (first.name, first.what, first.likely.cause) == ("embedding.weight", "start value", cause)
