"""Buckets: the flat pieces of memory in which parameters and gradients live and travel.

A bucket holds the tensors of one unit that share dtype, trainability, replica group, partial groups and tied set:

    | decaying segments ...   | plain segments ...  | padding |
    ^ every segment starts at a multiple of ALIGN elements    ^ a multiple of ALIGN (x shards when sharded)

A shard of it is a run of elements whose bounds are multiples of ALIGN too: fused AdamW changes bits at odd bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from meshwright.layout.groups import Group, GroupName
from meshwright.layout.ownership import Ownership
from meshwright.plan.meeting import plan_groups
from meshwright.plan.owners import owners
from meshwright.plan.plan import Plan
from meshwright.plan.stages import stage_units

ALIGN = 64  # elements


@dataclass(frozen=True, slots=True)
class Segment:
    """Where one tensor lies in its bucket: offset in elements, local shape (padded where a cut is uneven)."""

    owner: Ownership
    offset: int
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.owner.tensor.name

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class Bucket:
    """`units` read it on this stage; `numel` counts padding; [0, decay_stop) is the part that weight decay touches."""

    index: int
    units: tuple[int, ...]
    segments: tuple[Segment, ...]
    replicas: GroupName
    partial: tuple[GroupName, ...]
    trainable: bool
    tied: bool
    numel: int
    decay_stop: int

    @property
    def tied_elsewhere(self) -> bool:
        """Whether the other end of its tie stands on another stage: both ends' gradients are then one sum."""
        return self.tied and len(self.units) == 1

    def shard(self, ways: int, place: int) -> tuple[int, int]:
        """The bounds of shard `place` of `ways`, in elements: equal blocks of whole ALIGNs, the last ones short."""
        block = ceil_to(-(-self.numel // ways), ALIGN)
        return min(place * block, self.numel), min((place + 1) * block, self.numel)


def ceil_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@lru_cache(maxsize=256)
def stage_buckets(plan: Plan, stage: int) -> tuple[Bucket, ...]:
    """The buckets of one pipeline coordinate, in order of first use."""
    here = stage_units(plan, stage)
    held = [owner for owner in owners(plan) if stage in owner.stages]
    ordered = sorted(held, key=lambda owner: (here.index(_first_unit(owner, here)), *_key(owner)))
    built: list[Bucket] = []
    for (first, *_), run in groupby(ordered, key=lambda owner: (_first_unit(owner, here), *_key(owner))):
        for members in _capped(plan, list(run)):
            built.append(_build(plan, len(built), first, members, here))
    return tuple(built)


def sharding_group(plan: Plan, replicas: GroupName) -> Group:
    """The group over which the shards of a bucket meet: all its replicas, or the inner groups of hybrid sharding."""
    return plan_groups(plan)[GroupName.SHARD if is_hybrid(plan, replicas) else replicas]


def is_hybrid(plan: Plan, replicas: GroupName) -> bool:
    """Whether a bucket's shards meet in an inner group, and copies of each shard over `copy`."""
    return plan.sharding.stage > 0 and plan.sharding.within > 0 and replicas is GroupName.DENSE


def in_pieces(plan: Plan, bucket: Bucket) -> bool:
    """Whether ranks keep shards of a bucket's parameters: one that nobody else holds (experts on their own axis) is
    always whole."""
    return plan.sharding.stage == 3 and sharding_group(plan, bucket.replicas).size > 1


def by_unit(buckets: Iterable[Bucket]) -> dict[int, tuple[int, ...]]:
    """Unit -> the indices of those of `buckets` that it reads; a unit that reads none of them has no entry."""
    found: dict[int, tuple[int, ...]] = {}
    for bucket in buckets:
        for unit in bucket.units:
            found[unit] = (*found.get(unit, ()), bucket.index)
    return found


def _first_unit(owner: Ownership, here: tuple[int, ...]) -> int:
    return next(unit for unit in here if unit in owner.tensor.readers)


def _key(owner: Ownership) -> tuple[str, tuple[GroupName, ...], bool, bool]:
    return owner.replicas.value, owner.partial, not owner.tensor.trainable, owner.tensor.tied


def _capped(plan: Plan, members: list[Ownership]) -> list[list[Ownership]]:
    """Split a run of tensors so that no bucket passes the asked bytes, a single larger tensor excepted."""
    cap = plan.sharding.bucket_bytes
    if not cap:
        return [members]
    parts: list[list[Ownership]] = [[]]
    filled = 0
    for owner in members:
        size = math.prod(owner.local_shape(plan.degrees)) * plan.precision.reduce.num_bytes
        if parts[-1] and filled + size > cap:
            parts.append([])
            filled = 0
        parts[-1].append(owner)
        filled += size
    return parts


def _build(plan: Plan, index: int, first: int, members: list[Ownership], here: tuple[int, ...]) -> Bucket:
    decaying = [owner for owner in members if owner.tensor.decays]
    plain = [owner for owner in members if not owner.tensor.decays]
    segments: list[Segment] = []
    offset = decay_stop = 0
    for owner in (*decaying, *plain):
        shape = owner.local_shape(plan.degrees)
        segments.append(Segment(owner, offset, shape))
        offset = ceil_to(offset + math.prod(shape), ALIGN)
        decay_stop = offset if owner.tensor.decays else decay_stop
    head = members[0]
    ways = sharding_group(plan, head.replicas).size if plan.sharding.stage else 1
    tied = head.tensor.tied
    return Bucket(
        index=index,
        units=tuple(unit for unit in here if unit in head.tensor.readers) if tied else (first,),
        segments=tuple(segments),
        replicas=head.replicas,
        partial=head.partial,
        trainable=head.tensor.trainable,
        tied=tied,
        numel=ceil_to(offset, ALIGN * ways),
        decay_stop=decay_stop,
    )
