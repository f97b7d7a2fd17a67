"""Rungs: every axis and feature a run uses alone, in pairs, and all together; nothing that it does not use."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.arch.arch import Experts
from meshwright.config.choices import Balance, Context, Documents, Dtype, Recompute, Schedule
from meshwright.plan.plan import ContextSplit, Moe, Plan, Precision
from meshwright.plan.rules import canonical, check_plan
from meshwright.verify.ladder import FEATURES, features_of, ladder
from meshwright.verify.settings import DOUBLE
from tests.unit.plan.plans import make_plan

WHOLE = Precision(Dtype.FLOAT64, Dtype.FLOAT64, Dtype.FLOAT64)


def names(plan: Plan) -> list[str]:
    return [rung.name for rung in ladder(canonical(plan))]


def test_one_process_that_uses_nothing_is_one_rung() -> None:
    assert names(make_plan(micro=4, precision=WHOLE)) == ["one process"]


def test_rounding_decides_no_choice_of_experts() -> None:
    rungs = ladder(canonical(make_plan(micro=4, arch={"experts": Experts(8, 2, 32)})))
    experts = [rung.plan.arch.experts for rung in rungs]
    assert [(each.active, each.count) for each in experts if each is not None] == [(2, 8), (8, 8)]


def test_what_routers_add_has_a_gradient_in_every_precision() -> None:
    """At even choice the auxiliary term is constant: a loss scale that it lacks would be seen by nobody."""
    moe = Moe(Balance.AUXILIARY, auxiliary_loss=0.5)
    plan = replace(make_plan(micro=4, arch={"experts": Experts(8, 2, 32)}), moe=moe)
    terms = [(rung.plan.moe.auxiliary_loss, rung.plan.moe.z_loss) for rung in ladder(canonical(plan))]
    assert terms == [(0.5, 0.0), (0.5, 0.5)]


def test_precision_is_a_rung_of_its_own_at_the_end() -> None:
    rungs = ladder(canonical(make_plan(micro=4)))
    assert [rung.name for rung in rungs] == ["one process", "precision"]
    assert [rung.plan.precision for rung in rungs] == [DOUBLE, Precision()]


def test_data_parallel_with_accumulation() -> None:
    rungs = ladder(canonical(make_plan(dp=2, micro=2, accumulation=3, precision=WHOLE)))
    shapes = [(rung.name, rung.plan.degrees.dp, rung.plan.batch.micro, rung.plan.accumulation) for rung in rungs]
    assert shapes == [
        ("one process", 1, 12, 1),
        ("dp", 2, 6, 1),
        ("accumulation", 1, 2, 6),
        ("dp + accumulation", 2, 2, 3),
    ]


def test_what_decides_nothing_alone_is_no_rung() -> None:
    """ZeRO needs replicas, a schedule needs stages, recomputation and cut buckets need nothing."""
    plan = make_plan(
        dp=2, zero=2, bucket_bytes=4096, micro=2, recompute=Recompute.FULL, precision=WHOLE, pp=2, layers=4,
        schedule=Schedule.GPIPE,
    )  # fmt: skip
    listed = names(plan)
    assert listed[0] == "one process"
    assert listed[-1] == "dp + pp + schedule + zero + cut buckets + recompute"
    assert {"dp", "pp", "cut buckets", "recompute", "dp + zero", "pp + schedule", "dp + recompute"} <= set(listed)
    assert not {"zero", "schedule", "zero + schedule"} & set(listed)


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 2), st.integers(0, 3), st.integers(1, 2), st.integers(1, 3), st.booleans())
def test_every_rung_is_legal_and_equal_plans_appear_once(
    dp: int, pp: int, zero: int, micro: int, accumulation: int, recompute: bool
) -> None:
    kind = Recompute.FULL if recompute else Recompute.NONE
    plan = canonical(
        make_plan(dp=dp, pp=pp, zero=zero, micro=micro, accumulation=accumulation, recompute=kind, layers=3)
    )
    rungs = ladder(plan)
    assert len({rung.plan for rung in rungs}) == len(rungs)
    for rung in rungs:
        check_plan(rung.plan)
        assert rung.plan.batch.sequences == plan.batch.sequences
        assert rung.plan.arch == plan.arch
    assert rungs[0].plan.degrees.ranks == 1
    last = replace(rungs[-1].plan, optimizer=plan.optimizer, name=plan.name)
    assert last == plan


def test_features_are_told_by_name() -> None:
    assert features_of(canonical(make_plan(dp=2, zero=3, within=0, reshard=False, precision=WHOLE))) == (
        "dp",
        "zero",
        "kept parameters",
    )
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)


def test_dropout_and_document_masks_are_features() -> None:
    plan = make_plan(dp=2, precision=WHOLE, arch={"dropout": 0.1})
    plan = canonical(replace(plan, data=replace(plan.data, documents=Documents.MASKED)))
    listed = names(plan)
    assert listed == [
        "one process",
        "dp",
        "dropout",
        "document masks",
        "dp + dropout",
        "dp + document masks",
        "dropout + document masks",
        "dp + dropout + document masks",
    ]


def test_the_context_axis_and_its_kind_are_features() -> None:
    plan = replace(make_plan(cp=4, micro=4, precision=WHOLE), context=ContextSplit(Context.RING, 2))
    rungs = {rung.name: rung.plan for rung in ladder(canonical(plan))}
    assert list(rungs) == ["one process", "cp", "cp + context kind"]
    assert [each.context for each in rungs.values()] == [ContextSplit(), ContextSplit(), ContextSplit(Context.RING, 2)]
    assert names(make_plan(cp=2, micro=4, precision=WHOLE)) == ["one process", "cp"]
