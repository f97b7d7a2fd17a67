"""Coordinates, factors and groups: every rank has one place, every group is a partition of the mesh."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.layout.axes import Axis, Coordinates, Degrees, Factor, split, whole
from meshwright.layout.groups import GroupName, groups

degree = st.integers(1, 2)
meshes = st.builds(
    Degrees,
    dp=degree,
    tp=degree,
    pp=st.integers(1, 3),
    cp=degree,
    ep=degree,
    order=st.permutations(list(Axis)).map(tuple),
)


def test_the_drawn_mesh() -> None:
    """dp 2, tp 2: tp varies fastest."""
    degrees = Degrees(dp=2, tp=2)
    assert [(at.dp, at.tp) for at in map(degrees.coordinates, range(4))] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@given(meshes)
def test_rank_and_coordinates_are_inverse(degrees: Degrees) -> None:
    places = [degrees.coordinates(rank) for rank in range(degrees.ranks)]
    assert [degrees.rank(at) for at in places] == list(range(degrees.ranks))
    assert len(set(places)) == degrees.ranks
    assert all(at.on(axis) < degrees.on(axis) for at in places for axis in Axis)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_mesh_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"rank must lie in 0 \.\. 3"):
        Degrees(dp=4).coordinates(rank)


def test_impossible_meshes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Degrees(dp=0)
    with pytest.raises(ValueError, match="each of"):
        Degrees(order=(Axis.DP, Axis.TP))
    for degree in (2.0, "2", None):
        with pytest.raises(ValueError, match=r"ep = .*: a degree must be an integer"):
            Degrees(ep=degree)  # type: ignore[arg-type]


def test_a_mesh_tells_its_axes_outermost_first() -> None:
    assert str(Degrees(dp=2, cp=4)) == "dp 2 x cp 4"
    assert str(Degrees(dp=2, cp=4, order=(Axis.CP, Axis.TP, Axis.PP, Axis.EP, Axis.DP))) == "cp 4 x dp 2"
    assert str(Degrees()) == "one process"


@pytest.mark.parametrize("ways", [{"shard_within": 3}, {"kv_copies": 3}, {"ulysses": 3}, {"ulysses": 0}])
def test_groups_that_do_not_divide_their_axes_are_refused(ways: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="cannot be cut into groups of"):
        groups(Degrees(dp=2, tp=4, cp=4), **ways)


@given(meshes, st.data())
def test_two_factors_make_the_index(degrees: Degrees, data: st.DataObject) -> None:
    axes = tuple(data.draw(st.lists(st.sampled_from(list(Axis)), min_size=1, max_size=3, unique=True)))
    total = degrees.over(*axes)
    inner = data.draw(st.sampled_from([each for each in range(1, total + 1) if total % each == 0]))
    outer_factor, inner_factor = split(degrees, inner, *axes)
    for rank in range(degrees.ranks):
        at = degrees.coordinates(rank)
        index = whole(degrees, *axes).of(degrees, at)
        assert index == degrees.index(axes, at)
        assert outer_factor.of(degrees, at) * inner + inner_factor.of(degrees, at) == index


def test_a_split_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="dp x ep = 6 cannot be cut into groups of 4"):
        split(Degrees(dp=3, ep=2), 4, Axis.DP, Axis.EP)


@settings(max_examples=40, deadline=None)
@given(meshes, st.data())
def test_every_group_but_tied_partitions_the_mesh(degrees: Degrees, data: st.DataObject) -> None:
    dense = degrees.over(Axis.DP, Axis.EP, Axis.CP)
    within = data.draw(st.sampled_from([0, *(each for each in range(1, dense + 1) if dense % each == 0)]))
    for name, group in groups(degrees, within).items():
        found: set[tuple[int, ...]] = set()
        for rank in range(degrees.ranks):
            at = degrees.coordinates(rank)
            if name is not GroupName.TIED or at.pp in (0, degrees.pp - 1):
                members = group.members(degrees, at)
                assert len(members) == group.size, name
                assert members[group.place(degrees, at)] == rank, name
                found.add(members)
        grouped = [rank for members in found for rank in members]
        assert len(grouped) == len(set(grouped)), name


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_tied_group_joins_the_first_and_the_last_stage(stages: int) -> None:
    degrees = Degrees(pp=stages, dp=2)
    tied = groups(degrees)[GroupName.TIED]
    ends = tuple(dict.fromkeys((1, 2 * (stages - 1) + 1)))
    assert tied.members(degrees, Coordinates(dp=1)) == ends
    assert tied.members(degrees, Coordinates(dp=1, pp=stages - 1)) == ends


def test_the_inner_stages_stand_alone_in_the_tied_group() -> None:
    degrees = Degrees(pp=4)
    tied = groups(degrees)[GroupName.TIED]
    assert [tied.members(degrees, Coordinates(pp=stage)) for stage in (1, 2)] == [(1,), (2,)]


def test_hybrid_groups_drawn() -> None:
    """Eight replicas sharded within four: shards meet among neighbours, copies a stride of four apart."""
    degrees = Degrees(dp=8)
    table = groups(degrees, 4)
    at = Coordinates(dp=6)
    assert table[GroupName.SHARD].members(degrees, at) == (4, 5, 6, 7)
    assert table[GroupName.COPY].members(degrees, at) == (2, 6)
    assert table[GroupName.DENSE].members(degrees, at) == tuple(range(8))


def test_expert_replicas_leave_the_expert_axis_out() -> None:
    degrees = Degrees(dp=2, ep=2)
    assert groups(degrees)[GroupName.EXPERT].members(degrees, Coordinates()) == (0, 2)
    assert groups(degrees)[GroupName.DENSE].members(degrees, Coordinates()) == (0, 1, 2, 3)


def test_a_factor_is_one_digit() -> None:
    degrees = Degrees(tp=6)
    assert [Factor((Axis.TP,), 3, stride=2).of(degrees, Coordinates(tp=at)) for at in range(6)] == [0, 0, 1, 1, 2, 2]
