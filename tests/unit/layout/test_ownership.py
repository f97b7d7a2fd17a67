"""Ownership: over all ranks each element of a tensor has exactly one owner, whatever cuts it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.arch.tensors import Init, LogicalAxis, Tensor
from meshwright.layout.axes import Axis, Degrees, split, whole
from meshwright.layout.groups import REPLICA_AXES, GroupName
from meshwright.layout.ownership import Cut, Ownership
from meshwright.layout.rectangles import Rectangle, flat_rectangles, full


def tensor(*shape: int) -> Tensor:
    return Tensor("w", shape, (LogicalAxis.HIDDEN,) * len(shape), Init(), 0, (0,))


def paint(into: np.ndarray, rectangle: Rectangle) -> None:
    into[tuple(slice(a, b) for a, b in zip(rectangle.start, rectangle.stop, strict=True))] += 1


@st.composite
def ownerships(draw: st.DrawFn) -> tuple[Degrees, Ownership]:
    degree = st.integers(1, 4)
    degrees = Degrees(dp=draw(degree), tp=draw(degree), pp=draw(st.integers(1, 3)), ep=draw(st.integers(1, 2)))
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    stages = tuple(sorted(draw(st.sets(st.integers(0, degrees.pp - 1), min_size=1))))
    cuts = []
    free = list(range(len(shape)))
    for axes in draw(st.sampled_from([((Axis.TP,), (Axis.EP,)), ((Axis.EP, Axis.TP),), ((Axis.TP, Axis.EP),)])):
        if not free or not draw(st.booleans()):
            continue
        ways = degrees.over(*axes)
        inner = draw(st.sampled_from([each for each in range(1, ways + 1) if ways % each == 0]))
        digits = split(degrees, inner, *axes)
        chosen = draw(st.sampled_from([(whole(degrees, *axes),), digits, digits[:1], digits[1:]]))
        for digit in chosen:
            if free:
                cuts.append(Cut(free.pop(draw(st.integers(0, len(free) - 1))), digit))
    return degrees, Ownership(tensor(*shape), stages, tuple(cuts), GroupName.EXPERT)


@given(ownerships())
def test_every_element_has_exactly_one_owner(case: tuple[Degrees, Ownership]) -> None:
    degrees, owner = case
    owned = np.zeros(owner.tensor.shape, dtype=int)
    held = np.zeros((degrees.pp, *owner.tensor.shape), dtype=int)
    for rank in range(degrees.ranks):
        at = degrees.coordinates(rank)
        rectangle = owner.rectangle(degrees, at)
        assert all(size <= most for size, most in zip(rectangle.extent, owner.local_shape(degrees), strict=True))
        if owner.owns(degrees, at):
            assert owner.holds(at)
            paint(owned, rectangle)
        if owner.holds(at):
            paint(held[at.pp], rectangle)
    assert (owned == 1).all()
    for stage in owner.stages:
        assert (held[stage] >= 1).all()
        assert len(np.unique(held[stage])) == 1


@given(ownerships())
def test_a_replica_group_shares_out_what_its_ranks_count(case: tuple[Degrees, Ownership]) -> None:
    """Replicas cut their copies among them; then each element is counted in one replica group, whatever copies it."""
    degrees, owner = case
    owned = np.zeros(owner.tensor.shape, dtype=int)
    ways = degrees.over(*REPLICA_AXES[owner.replicas])
    for rank in range(degrees.ranks):
        at = degrees.coordinates(rank)
        if owner.owns(degrees, at, REPLICA_AXES[owner.replicas]):
            paint(owned, owner.rectangle(degrees, at))
    assert (owned == ways).all()


def test_what_is_copied_is_not_cut() -> None:
    """One flag for two meanings once left experts out of a norm; here one tensor cannot have both."""
    degrees = Degrees(ep=2, tp=2)
    with pytest.raises(ValueError, match="w: ep cannot both cut and copy it"):
        Ownership(tensor(4), (0,), (Cut(0, whole(degrees, Axis.EP)),))
    with pytest.raises(ValueError, match="w: pp cannot both"):
        Ownership(tensor(4), (0,), (Cut(0, whole(degrees, Axis.PP)),))
    cuts = Cut(0, whole(degrees, Axis.EP)), Cut(1, whole(degrees, Axis.EP, Axis.TP))
    with pytest.raises(ValueError, match=r"w: its cuts share ep.*, but not one index"):
        Ownership(tensor(4, 4), (0,), cuts, GroupName.EXPERT)


def test_an_uneven_cut_leaves_the_last_blocks_short_or_empty() -> None:
    """B-style padding: 5 rows over 4 ranks are 2, 2, 1 and 0, each stored in 2."""
    degrees = Degrees(tp=4)
    owner = Ownership(tensor(5, 3), (0,), (Cut(0, whole(degrees, Axis.TP)),))
    rows = [owner.rectangle(degrees, degrees.coordinates(rank)).extent[0] for rank in range(4)]
    assert rows == [2, 2, 1, 0]
    assert owner.local_shape(degrees) == (2, 3)


def test_key_heads_cut_less_than_query_heads() -> None:
    """tp 4 on two key/value heads: tp = cut 2 x copy 2, neighbours share a head; the first of each pair owns."""
    degrees = Degrees(tp=4)
    outer, _ = split(degrees, 2, Axis.TP)
    owner = Ownership(tensor(2, 8), (0,), (Cut(0, outer),))
    places = [degrees.coordinates(rank) for rank in range(4)]
    assert [owner.rectangle(degrees, at).start[0] for at in places] == [0, 0, 1, 1]
    assert [owner.owns(degrees, at) for at in places] == [True, False, True, False]


def test_a_tied_tensor_is_owned_on_its_first_stage() -> None:
    degrees = Degrees(pp=3)
    owner = Ownership(tensor(4), (0, 2))
    assert [owner.holds(degrees.coordinates(rank)) for rank in range(3)] == [True, False, True]
    assert [owner.owns(degrees, degrees.coordinates(rank)) for rank in range(3)] == [True, False, False]


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_a_flat_range_is_few_rectangles_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = int(np.prod(shape, dtype=int))
    first = data.draw(st.integers(0, size))
    last = data.draw(st.integers(first, size))
    flat = np.arange(size).reshape(shape)
    taken: list[int] = []
    pieces = list(flat_rectangles(shape, first, last))
    for rectangle, offset in pieces:
        elements = flat[tuple(slice(a, b) for a, b in zip(rectangle.start, rectangle.stop, strict=True))].ravel()
        assert elements[0] == offset
        taken += list(elements)
    assert taken == list(range(first, last))
    assert len(pieces) <= max(1, 2 * len(shape) - 1)


def test_a_flat_range_drawn() -> None:
    pieces = list(flat_rectangles((4, 6), 3, 14))
    assert pieces == [
        (Rectangle((0, 3), (1, 3)), 3),
        (Rectangle((1, 0), (1, 6)), 6),
        (Rectangle((2, 0), (1, 2)), 12),
    ]


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (Rectangle((1, 1), (5, 1)), Rectangle((1, 1), (3, 1))),
        (Rectangle((4, 0), (1, 3)), None),
        (Rectangle((0, 0), (0, 3)), None),
    ],
)
def test_intersections(other: Rectangle, shared: Rectangle | None) -> None:
    assert full((4, 3)).intersect(other) == shared


def test_a_rectangle_counted_from_a_corner() -> None:
    assert Rectangle((3, 2), (1, 2)).within(Rectangle((2, 2), (2, 4))) == Rectangle((1, 0), (1, 2))
