"""Stages: every block once, in order, and the dearest stage as cheap as it can be."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.arch.parameters import tensors
from meshwright.plan.buckets import stage_buckets
from meshwright.plan.stages import balanced, place, stage_of_unit, stage_units, virtual_of, virtual_stages
from tests.unit.plan.plans import make_plan


@pytest.mark.parametrize(
    ("layers", "stages", "counts"), [(7, 2, (4, 3)), (10, 3, (4, 3, 3)), (30, 4, (8, 8, 7, 7)), (80, 16, (5,) * 16)]
)
def test_no_layer_vanishes(layers: int, stages: int, counts: tuple[int, ...]) -> None:
    """B33 (NVIDIA/Megatron-LM#1304): 30 layers over 4 stages trained 28."""
    cut = balanced([1.0] * layers, 0.0, 0.0, stages)
    assert sorted(cut, reverse=True) == list(counts)
    assert sum(cut) == layers


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 4), st.floats(0, 6), st.floats(0, 6))
def test_every_cut_is_complete(layers: int, stages: int, chunks: int, first: float, last: float) -> None:
    cut = balanced([1.0] * layers, first, last, stages * chunks)
    assert len(cut) == stages * chunks
    assert sum(cut) == layers
    assert layers < stages * chunks or min(cut) >= 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.integers(0, 9), st.integers(0, 9), st.data())
def test_no_other_cut_has_a_cheaper_dearest_stage(costs: list[int], first: int, last: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))

    def dearest(bounds: tuple[int, ...]) -> int:
        edges = (0, *bounds, len(costs))
        runs = [sum(costs[a:b]) for a, b in pairwise(edges)]
        runs[0] += first
        runs[-1] += last
        return max(runs)

    cut = balanced([float(cost) for cost in costs], float(first), float(last), parts)
    bounds = tuple(sum(cut[: index + 1]) for index in range(parts - 1))
    assert dearest(bounds) == min(dearest(each) for each in combinations(range(1, len(costs)), parts - 1))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 20), st.booleans())
def test_units_and_parameters_are_complete(pp: int, chunks: int, more: int, tied: bool) -> None:
    plan = make_plan(layers=pp * chunks + more, pp=pp, chunks=chunks, arch={"tie_embeddings": tied})
    order = [unit for units in virtual_stages(plan) for unit in units]
    assert order == list(range(plan.arch.num_units))
    assert sorted(unit for stage in range(pp) for unit in stage_units(plan, stage)) == order
    assert all(stage_of_unit(plan)[unit] == stage for stage in range(pp) for unit in stage_units(plan, stage))
    names = [
        segment.name for stage in range(pp) for bucket in stage_buckets(plan, stage) for segment in bucket.segments
    ]
    assert set(names) == {tensor.name for tensor in tensors(plan.arch)}
    assert len(names) == len(set(names)) + (tied and pp > 1)


@given(st.integers(1, 6), st.integers(1, 4))
def test_virtual_stages_have_one_place(pp: int, chunks: int) -> None:
    plan = make_plan(layers=pp * chunks, pp=pp, chunks=chunks)
    places = [place(plan, virtual) for virtual in range(pp * chunks)]
    assert len(set(places)) == pp * chunks
    assert [virtual_of(plan, *each) for each in places] == list(range(pp * chunks))
