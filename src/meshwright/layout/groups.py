"""The communication groups of a mesh: one list, the same on every rank.

| group  | over                      | carries                                              |
|--------|---------------------------|------------------------------------------------------|
| tp cp ep pp | that axis            | what their strategies declare inside a unit          |
| batch  | dp x ep                   | different samples: the count of trained tokens       |
| dense  | dp x ep x cp              | gradient sums and ZeRO of non-expert tensors         |
| expert | dp x cp                   | the same for expert tensors                          |
| shard, copy | dense = copy x shard | hybrid sharding: pieces meet over shard              |
| tokens | dp x ep x cp              | loss sums (then over pp)                             |
| tied   | first and last stage      | the gradient of a tied tensor                        |
| kv_copy | tp = kv_cut x kv_copy    | gradients of key/value heads that several ranks hold |
| ring, ulysses | cp = ring x ulysses | keys and values; heads of attention for its tokens   |
| world  | all                       | one packed sum a step                                |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType

from meshwright.layout.axes import Axis, Coordinates, Degrees, Factor, split, whole


class GroupName(StrEnum):
    TP = "tp"
    PP = "pp"
    CP = "cp"
    EP = "ep"
    BATCH = "batch"
    DENSE = "dense"
    EXPERT = "expert"
    SHARD = "shard"
    COPY = "copy"
    TOKENS = "tokens"
    TIED = "tied"
    KV_COPY = "kv_copy"
    RING = "ring"
    ULYSSES = "ulysses"
    WORLD = "world"

    @property
    def reported(self) -> GroupName:
        """The group that a row of the ledger names: a factor of an axis is told as its axis."""
        return _AXIS_OF.get(self, self)


_AXIS_OF = {GroupName.KV_COPY: GroupName.TP, GroupName.RING: GroupName.CP, GroupName.ULYSSES: GroupName.CP}

BATCH_AXES = (Axis.DP, Axis.EP)
DENSE_AXES = (Axis.DP, Axis.EP, Axis.CP)
EXPERT_AXES = (Axis.DP, Axis.CP)
REPLICA_AXES = {GroupName.DENSE: DENSE_AXES, GroupName.EXPERT: EXPERT_AXES}
"""The axes over which the ranks of a replica group differ."""


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that differ only in one factor of the mesh."""

    name: GroupName
    factor: Factor

    @property
    def size(self) -> int:
        return self.factor.degree

    def members(self, degrees: Degrees, at: Coordinates) -> tuple[int, ...]:
        """The ranks of the group that `at` belongs to, by their digit on the factor; a lone rank is its own group."""
        step, ways = self.factor.stride, self.factor.degree
        here = degrees.index(self.factor.axes, at)
        base = here - here // step % ways * step
        ranks = [degrees.rank(at) - sum(at.on(axis) * degrees.stride(axis) for axis in self.factor.axes)]
        for axis in sorted(self.factor.axes, key=degrees.order.index):  # all ranks over the axes, in order of index
            steps = range(0, degrees.on(axis) * degrees.stride(axis), degrees.stride(axis))
            ranks = [rank + each for rank in ranks for each in steps]
        return tuple(ranks[base : base + ways * step : step])

    def place(self, degrees: Degrees, at: Coordinates) -> int:
        """The index of `at` inside its group."""
        return self.factor.of(degrees, at)


@lru_cache(maxsize=256)
def groups(degrees: Degrees, shard_within: int = 0, kv_copies: int = 1, ulysses: int = 1) -> Mapping[GroupName, Group]:
    """Every group of the mesh, in the order in which communicators are made.

    `shard_within` 0 shards over all; `kv_copies` neighbours on the tensor axis hold the same key/value heads; `ulysses`
    neighbours on the context axis exchange heads for tokens, the others form rings. Raises ValueError where one cannot
    divide its axes.
    """
    dense = whole(degrees, *DENSE_AXES)
    copy, shard = split(degrees, shard_within or dense.degree, *DENSE_AXES)
    ring, inner = split(degrees, ulysses, Axis.CP)
    _, kv_copy = split(degrees, kv_copies, Axis.TP)
    stages = degrees.pp
    factors = {
        GroupName.TP: whole(degrees, Axis.TP),
        GroupName.PP: whole(degrees, Axis.PP),
        GroupName.CP: whole(degrees, Axis.CP),
        GroupName.EP: whole(degrees, Axis.EP),
        GroupName.BATCH: whole(degrees, *BATCH_AXES),
        GroupName.DENSE: dense,
        GroupName.EXPERT: whole(degrees, *EXPERT_AXES),
        GroupName.SHARD: shard,
        GroupName.COPY: copy,
        GroupName.TOKENS: dense,
        GroupName.TIED: Factor((Axis.PP,), min(stages, 2), stride=max(stages - 1, 1)),
        GroupName.KV_COPY: kv_copy,
        GroupName.RING: ring,
        GroupName.ULYSSES: inner,
        GroupName.WORLD: whole(degrees, *Axis),
    }
    return MappingProxyType({name: Group(name, factor) for name, factor in factors.items()})
