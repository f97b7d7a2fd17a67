"""The memory of one bucket: what is written, when it is there, and whose elements are updated."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from meshwright.layout.axes import Coordinates
from meshwright.parallel.allocator import Allocator, Event
from meshwright.parallel.store import Store
from meshwright.plan.buckets import ALIGN, stage_buckets
from meshwright.plan.category import Category
from tests.unit.plan.plans import make_plan

CPU = torch.device("cpu")


def store_of(zero: int = 0, dp: int = 2, place: int = 0, bucket: int = 1) -> Store:
    plan = make_plan(dp=dp, zero=zero)
    return Store(plan, stage_buckets(plan, 0)[bucket], Coordinates(place, 0, 0, 0, 0), Allocator(CPU))


def test_a_gradient_is_written_first_and_added_later() -> None:
    store = store_of()
    name = store.bucket.segments[0].name
    for wanted in (1.0, 3.0, 7.0):
        store.parameters[name].grad = torch.full_like(store.parameters[name], (wanted + 1) / 2)
        store.collect([name])
        segment = store.bucket.segments[0]
        assert store.gradient[segment.offset : segment.stop].unique().tolist() == [wanted]
        assert store.parameters[name].grad is None


def test_sealing_makes_zero_of_what_nobody_wrote() -> None:
    store = store_of()
    gradient = store.seal()
    assert gradient.numel() == store.bucket.numel
    assert not bool(gradient.any())
    assert store.seal() is gradient


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_nothing_of_a_gradient_is_left_after_the_update(zero: int) -> None:
    store = store_of(zero)
    before = store.allocator.total
    store.seal()
    target = store.target()
    target.copy_(store.own_gradient())
    store.absorb(target)
    assert store.reduced.numel() == store.last - store.first
    store.drop_gradients()
    assert store.allocator.total == before


@pytest.mark.parametrize("dp", [2, 3, 4])
def test_shards_are_equal_runs_of_whole_alignments(dp: int) -> None:
    stores = [store_of(1, dp, place) for place in range(dp)]
    bounds = [(store.first, store.last) for store in stores]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == stores[0].bucket.numel
    assert all(one[1] == other[0] for one, other in pairwise(bounds))
    assert {(last - first) % ALIGN for first, last in bounds} == {0}
    assert len({last - first for first, last in bounds}) == 1


def test_runs_cover_the_own_elements_once_and_decay_by_shape() -> None:
    for place in range(3):
        store = store_of(1, 3, place)
        assert sum(run.values.numel() for run in store.runs) == store.last - store.first
        decaying = sum(run.values.numel() for run in store.runs if run.decays)
        assert decaying == max(min(store.bucket.decay_stop, store.last) - store.first, 0)


def test_every_rank_fills_its_own_elements_with_the_same_numbers() -> None:
    whole = store_of(0)
    whole.initialise()
    for place in range(2):
        part = store_of(3, 2, place)
        part.initialise()
        assert part.shard is not None
        used = whole.whole[part.first : min(part.last, whole.bucket.numel)]
        assert torch.equal(part.shard[: used.numel()], used)
        assert not bool(part.shard[used.numel() :].any())


def test_a_gathered_unit_keeps_its_parameters_identity() -> None:
    store = store_of(3)
    store.initialise()
    parameter = next(iter(store.parameters.values()))
    store.regrow()
    address = parameter.untyped_storage().data_ptr()
    assert address == store.whole.untyped_storage().data_ptr()
    store.release()
    assert parameter.untyped_storage().nbytes() == 0
    assert parameter.shape == store.bucket.segments[0].shape


def test_the_allocator_tells_every_change() -> None:
    allocator, seen = Allocator(CPU), list[Event]()
    allocator.on_event = seen.append
    tensor = allocator.zeros(100, torch.float32, Category.GRADIENTS)
    allocator.action = 7
    allocator.release(tensor, Category.GRADIENTS)
    allocator.regrow(tensor, Category.GRADIENTS)
    assert [(event.action, event.num_bytes) for event in seen] == [(-1, 400), (7, -400), (7, 400)]
    assert (allocator.total, allocator.peak, allocator.live[Category.GRADIENTS]) == (400, 400, 400)
    allocator.empty(25, torch.float64, Category.BUFFERS)
    assert allocator.peak == 600
