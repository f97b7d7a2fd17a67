"""The list of process groups that a mesh needs, in the order in which they are made: the same on every rank.

    pp 2, dp 2      0 2   1 3       pp, tied
                    0 1   2 3       batch, dense, expert, shard, tokens
                    0 1 2 3         world
                    0 2   1 3       stage 0 to 1
                    0 2   1 3       stage 1 to 0

Making a group is collective over the world in torch, so each rank goes through the whole list and belongs to what names
it. Equal member sets are one group, whatever it is called; but each direction of each link between two stages has one
of its own, for receives are posted ahead of need and two directions on one ordered stream would wait for each other.
Stages form a ring:

    stage 0 --0>1--> stage 1 --1>2--> stage 2 --2>0--> stage 0      chunks of an interleaved schedule come round
            <--1>0--         <--2>1--         <--0>2--
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.layout.axes import Coordinates, Degrees
from meshwright.layout.groups import Group, GroupName, groups

__all__ = ["Joined", "communicators"]

_Link = tuple[int, int]
"""(source, target): stages of the pipeline, one direction."""


@dataclass(frozen=True, slots=True)
class Joined:
    """One process group: the `ranks` that it joins, in the order of their places, and what it is used as."""

    ranks: tuple[int, ...]
    names: tuple[GroupName, ...] = ()
    link: _Link | None = None

    @property
    def told(self) -> str:
        return self.names[0].value if self.link is None else f"stage {self.link[0]} to {self.link[1]}"


def communicators(degrees: Degrees, shard_within: int = 0, kv_copies: int = 1, ulysses: int = 1) -> tuple[Joined, ...]:
    """Every process group of the mesh; groups of one rank are none. Arguments are those of `groups`."""
    names: dict[tuple[int, ...], list[GroupName]] = {}
    for name, group in groups(degrees, shard_within, kv_copies, ulysses).items():
        for ranks in _member_sets(degrees, group):
            names.setdefault(ranks, []).append(name)
    shared = (Joined(ranks, tuple(used)) for ranks, used in names.items())
    links = (Joined(ranks, link=link) for link in _ring(degrees.pp) for ranks in _ends(degrees, link))
    return (*shared, *links)


def _member_sets(degrees: Degrees, group: Group) -> Iterator[tuple[int, ...]]:
    """The ranks of every group of this name that has more than one, by first rank."""
    if group.size > 1:
        for at in _places(degrees):
            if group.place(degrees, at) == 0:
                ranks = group.members(degrees, at)
                if len(ranks) > 1:
                    yield ranks


def _ring(stages: int) -> list[_Link]:
    """The directed links of a pipeline: every stage to the next one and back, the last next to the first."""
    if stages == 1:
        return []
    pairs = [(stage, (stage + 1) % stages) for stage in range(stages if stages > 2 else 1)]
    return [link for first, second in pairs for link in ((first, second), (second, first))]


def _ends(degrees: Degrees, link: _Link) -> Iterator[tuple[int, int]]:
    """The two ranks at the ends of a link, in every pipeline."""
    source, target = link
    for at in _places(degrees):
        if at.pp == source:
            yield degrees.rank(at), degrees.rank(replace(at, pp=target))


def _places(degrees: Degrees) -> Iterator[Coordinates]:
    return map(degrees.coordinates, range(degrees.ranks))
