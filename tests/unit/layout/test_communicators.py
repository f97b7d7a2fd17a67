"""B38: the process groups of a mesh are one list, which no rank's place changes, and it holds every group once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.layout.axes import Axis, Degrees
from meshwright.layout.communicators import communicators
from meshwright.layout.groups import GroupName, groups

degree = st.integers(1, 2)
meshes = st.builds(
    Degrees,
    dp=st.integers(1, 3),
    tp=degree,
    pp=st.integers(1, 3),
    cp=st.sampled_from([1, 2, 4]),
    ep=degree,
    order=st.permutations(list(Axis)).map(tuple),
)


@st.composite
def wanted(draw: st.DrawFn) -> tuple[Degrees, int, int, int]:
    """A mesh, its hybrid groups, copies of key/value heads, and neighbours that exchange heads."""
    degrees = draw(meshes)
    ways = degrees.over(Axis.DP, Axis.EP, Axis.CP)
    within = draw(st.sampled_from([0, *(each for each in range(1, ways + 1) if ways % each == 0)]))
    inner = draw(st.sampled_from([each for each in range(1, degrees.cp + 1) if degrees.cp % each == 0]))
    return degrees, within, draw(st.sampled_from([1, degrees.tp])), inner


@settings(max_examples=60, deadline=None)
@given(wanted())
def test_each_rank_finds_its_groups_in_the_list_and_no_others(case: tuple[Degrees, int, int, int]) -> None:
    """What a rank joins is the list filtered by its number: the groups it would name itself, each once."""
    listed = communicators(*case)
    table, degrees = groups(*case), case[0]
    for rank in range(degrees.ranks):
        at = degrees.coordinates(rank)
        mine = [joined for joined in listed if rank in joined.ranks]
        found = {name: joined.ranks for joined in mine for name in joined.names}
        by_itself = {name: group.members(degrees, at) for name, group in table.items()}
        assert found == {name: ranks for name, ranks in by_itself.items() if len(ranks) > 1}
        shared = [joined.ranks for joined in mine if joined.link is None]
        assert len(shared) == len(set(shared)), "equal members, two groups"
        ends = [joined.ranks for joined in mine if joined.link is not None]
        others = {} if degrees.pp == 1 else {(at.pp + 1) % degrees.pp, (at.pp - 1) % degrees.pp}
        assert len(ends) == 2 * len(others)
        assert all(len(pair) == 2 and rank in pair for pair in ends)


@settings(max_examples=60, deadline=None)
@given(wanted())
def test_the_list_names_every_group_once(case: tuple[Degrees, int, int, int]) -> None:
    degrees, listed = case[0], communicators(*case)
    assert len({(joined.ranks, joined.link) for joined in listed}) == len(listed)
    counted = Counter((name, rank) for joined in listed for name in joined.names for rank in joined.ranks)
    assert set(counted.values()) <= {1}
    links = {joined.link for joined in listed} - {None}
    assert links == {
        (one, other) for one in range(degrees.pp) for other in ((one + 1) % degrees.pp, (one - 1) % degrees.pp)
        if one != other
    }  # fmt: skip
    assert all(degrees.coordinates(joined.ranks[0]).pp == joined.link[0] for joined in listed if joined.link)


def test_a_stage_without_experts_still_knows_the_groups_of_those_with() -> None:
    """pp 2, ep 2: both stages' groups are there whatever their layers are, before any layer is asked."""
    listed = communicators(Degrees(pp=2, ep=2))
    assert [joined.ranks for joined in listed if GroupName.EP in joined.names] == [(0, 1), (2, 3)]


def test_the_list_of_two_stages_of_two() -> None:
    drawn = [(joined.ranks, [*map(str, joined.names)], joined.told) for joined in communicators(Degrees(pp=2, dp=2))]
    replicas = ["batch", "dense", "expert", "shard", "tokens"]
    assert drawn == [
        ((0, 2), ["pp", "tied"], "pp"),
        ((1, 3), ["pp", "tied"], "pp"),
        ((0, 1), replicas, "batch"),
        ((2, 3), replicas, "batch"),
        ((0, 1, 2, 3), ["world"], "world"),
        ((0, 2), [], "stage 0 to 1"),
        ((1, 3), [], "stage 0 to 1"),
        ((2, 0), [], "stage 1 to 0"),
        ((3, 1), [], "stage 1 to 0"),
    ]
