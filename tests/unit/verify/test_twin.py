"""The twin: small enough to run, and still the run in everything that could be wrong."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.arch.arch import Arch
from meshwright.arch.catalogue import catalogue
from meshwright.arch.checks import check_arch
from meshwright.config.choices import Context, Schedule
from meshwright.config.errors import RequestError
from meshwright.layout.axes import Axis
from meshwright.plan.plan import Batch, ContextSplit, Plan
from meshwright.plan.rules import canonical, check_plan
from meshwright.plan.stages import balanced
from meshwright.verify.ladder import features_of
from meshwright.verify.twin import MOST_RANKS, twin, work_flops
from tests.unit.plan.plans import make_plan


def large(arch: Arch, **mesh: int) -> Plan:
    plan = make_plan(micro=4, accumulation=8, **mesh)
    chunks = plan.pipeline.chunks
    stages = balanced([1.0] * arch.layers, 0.0, 0.0, plan.degrees.pp * chunks)
    return canonical(
        replace(
            plan,
            arch=arch,
            data=replace(plan.data, sequence_length=4096),
            pipeline=replace(plan.pipeline, stages=stages),
        )
    )


def test_a_small_run_is_its_own_twin() -> None:
    plan = make_plan(dp=2, micro=2, accumulation=2)
    assert twin(plan) == (plan, "")


@pytest.mark.parametrize("name", catalogue())
def test_the_twin_of_every_published_model(name: str) -> None:
    arch = catalogue()[name].arch
    plan = large(arch, dp=4, pp=2)
    small, told = twin(plan)
    check_arch(small.arch)
    check_plan(small)
    assert told.startswith("a scaled-down twin is verified: layers")
    assert work_flops(small) < 4e11
    assert small.degrees.ranks <= MOST_RANKS
    for switch in ("family", "norm", "activation", "gated", "qkv_bias", "qk_norm", "tie_embeddings", "mlp_bias"):
        assert getattr(small.arch, switch) == getattr(arch, switch)
    assert small.arch.heads * arch.kv_heads == arch.heads * small.arch.kv_heads
    assert (small.arch.rope is None) == (arch.rope is None)
    assert (small.arch.experts is None) == (arch.experts is None)
    if arch.sliding_window:
        assert small.arch.sliding_window > 0


@settings(deadline=None)  # the first call fills caches
@given(st.sampled_from([1, 2, 3, 4, 8, 64]), st.sampled_from([1, 2, 5, 16]), st.sampled_from([1, 2, 4]))
def test_axes_stay_axes_and_uneven_stays_uneven(dp: int, pp: int, tp: int) -> None:
    plan = large(make_plan(layers=33).arch, dp=dp, pp=pp, tp=tp)
    small, _ = twin(plan)
    check_plan(small)
    for axis in Axis:
        assert (small.degrees.on(axis) > 1) == (plan.degrees.on(axis) > 1)
    assert small.degrees.ranks <= MOST_RANKS
    assert features_of(small) == features_of(plan)
    assert (len(set(small.pipeline.stages)) > 1) == (len(set(plan.pipeline.stages)) > 1)
    assert min(small.pipeline.stages) >= 1
    assert (small.arch.vocab % small.degrees.tp == 0) == (plan.arch.vocab % plan.degrees.tp == 0)
    assert small.batch.micro == 2
    assert small.accumulation == 3


def test_features_survive() -> None:
    plan = make_plan(dp=8, zero=3, within=4, reshard=False, bucket_bytes=1 << 20, pp=4, layers=8, micro=8,
                     schedule=Schedule.GPIPE, accumulation=2)  # fmt: skip
    plan = canonical(replace(plan, batch=Batch(1024, 8)))
    small, told = twin(plan)
    assert told
    assert features_of(small) == features_of(plan)


@settings(deadline=None)
@given(st.sampled_from([2, 3, 4, 6, 8, 16]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 8, 64]), st.data())
def test_a_context_axis_stays_of_its_kind(cp: int, tp: int, dp: int, data: st.DataObject) -> None:
    """Whatever the heads, of which exchanges need a number that divides: some that the run has, the twin has too."""
    inners = [each for each in range(1, cp) if cp % each == 0]
    splits = [ContextSplit(kind) for kind in Context] + [ContextSplit(Context.RING, inner) for inner in inners]
    split, heads = data.draw(st.sampled_from(splits)), data.draw(st.sampled_from([(16, 16), (24, 8), (96, 2), (48, 1)]))
    sizes = {"heads": heads[0], "kv_heads": heads[1], "hidden": 16 * heads[0], "head_dim": 16}
    plan = large(make_plan(layers=9, arch=sizes).arch, dp=dp, cp=cp, tp=tp)
    plan = replace(plan, data=replace(plan.data, sequence_length=9600), context=split)
    try:
        check_plan(plan)
    except RequestError:  # heads that such an exchange cannot cut
        return
    small, _ = twin(plan)
    check_plan(small)
    assert small.degrees.ranks <= MOST_RANKS or split.inner > 1
    assert features_of(small) == features_of(plan)
    assert (small.context.kind, small.context.inner > 1) == (plan.context.kind, plan.context.inner > 1)
