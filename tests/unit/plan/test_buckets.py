"""Buckets: every tensor in exactly one segment of each holder; bounds aligned; shards cover."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.arch.arch import Experts
from meshwright.arch.parameters import tensors
from meshwright.layout.groups import GroupName
from meshwright.plan.action import Op
from meshwright.plan.buckets import ALIGN, in_pieces, sharding_group, stage_buckets
from meshwright.plan.category import Category
from meshwright.plan.folds.memory import memory
from meshwright.plan.owners import owners
from meshwright.plan.plan import Plan
from meshwright.plan.program import program
from tests.unit.plan.plans import make_plan
from tests.unit.plan.programs import plans


@settings(max_examples=100, deadline=None)
@given(plans())
def test_every_tensor_lies_in_one_segment_of_every_holder(plan: Plan) -> None:
    for stage in range(plan.degrees.pp):
        buckets = stage_buckets(plan, stage)
        assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
        names = [segment.name for bucket in buckets for segment in bucket.segments]
        assert sorted(names) == sorted(owner.tensor.name for owner in owners(plan) if stage in owner.stages)
        for bucket in buckets:
            stop = 0
            for segment in bucket.segments:
                assert segment.offset >= stop
                assert segment.offset % ALIGN == 0
                assert segment.owner.tensor.decays == (segment.offset < bucket.decay_stop)
                stop = segment.stop
            assert stop <= bucket.numel
            assert bucket.decay_stop % ALIGN == 0


@settings(max_examples=100, deadline=None)
@given(plans(), st.integers(1, 7))
def test_shards_cover_a_bucket_at_aligned_bounds(plan: Plan, ways: int) -> None:
    for bucket in stage_buckets(plan, 0):
        bounds = [bucket.shard(ways, place) for place in range(ways)]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == bucket.numel
        assert all(before[1] == after[0] for before, after in pairwise(bounds))
        assert all(first % ALIGN == 0 for first, _ in bounds)
        own = sharding_group(plan, bucket.replicas).size if plan.sharding.stage else 1
        lengths = {last - first for first, last in (bucket.shard(own, place) for place in range(own))}
        assert lengths == {bucket.numel // own}, "what travels is cut in equal shards"


def test_the_buckets_of_a_tiny_model() -> None:
    plan = make_plan()
    embedding, *blocks, head = stage_buckets(plan, 0)
    assert [segment.name for segment in embedding.segments] == ["embedding.weight"]
    assert [segment.name for segment in head.segments] == ["head.weight", "head.norm.weight"]
    assert [bucket.units for bucket in blocks] == [(1,), (2,)]
    decaying = [segment.name.split(".", 2)[2] for segment in blocks[0].segments if segment.owner.tensor.decays]
    attention = [f"attention.{name}.weight" for name in ("query", "key", "value", "output")]
    assert decaying == [*attention, *(f"mlp.{name}.weight" for name in ("gate", "up", "down"))]


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_a_tied_tensor_has_a_bucket_of_its_own_padded_alike(pp: int) -> None:
    plan = make_plan(layers=3, pp=pp, dp=2, zero=1, arch={"tie_embeddings": True})
    first, last = (next(bucket for bucket in stage_buckets(plan, stage) if bucket.tied) for stage in (0, pp - 1))
    assert [segment.name for segment in first.segments] == ["embedding.weight"]
    assert first.numel == last.numel
    if pp == 1:
        assert first.units == (0, plan.arch.head_unit)
    else:
        assert (first.units, last.units) == ((0,), (plan.arch.head_unit,))


def test_a_cap_cuts_a_unit_into_several_buckets() -> None:
    plan = make_plan(dp=2, bucket_bytes=40_000)
    of_block = [bucket for bucket in stage_buckets(plan, 0) if bucket.units == (1,)]
    assert len(of_block) > 1
    for bucket in of_block:
        assert len(bucket.segments) == 1 or 4 * sum(segment.numel for segment in bucket.segments) <= 40_000


def test_all_parameters_are_there() -> None:
    plan = make_plan(layers=3)
    held = sum(segment.numel for bucket in stage_buckets(plan, 0) for segment in bucket.segments)
    assert held == sum(tensor.numel for tensor in tensors(plan.arch))


@pytest.mark.parametrize(("dp", "cut"), [(1, False), (2, True)])
def test_experts_that_nobody_else_holds_stay_whole(dp: int, cut: bool) -> None:
    """They were released with the rest under ZeRO-3, and never gathered: a storage of size 0 in the first forward."""
    plan = make_plan(dp=dp, ep=4, zero=3, arch={"experts": Experts(4, 2, 64)})
    steps = program(plan, 0)
    experts = [bucket for bucket in steps.buckets if bucket.replicas is GroupName.EXPERT]
    assert [in_pieces(plan, bucket) for bucket in experts] == [cut, cut]
    gathered = {action.bucket for action in steps.actions if action.op is Op.GATHER}
    assert [bucket.index in gathered for bucket in experts] == [cut, cut]
    held = sum(bucket.numel // (dp if bucket in experts else 4 * dp) for bucket in steps.buckets)
    assert memory(plan, 0).states[Category.PARAMETERS] == 4 * held
