"""Where the logical tensors of a plan lie: on which ranks, in which elements of which bucket.

A *placed piece* joins a rectangle of a logical tensor to the flat memory that holds it:

    bucket     | segment w (4 x 3)         | segment v | padding |
    shard 1 of 2             ^ flat range of the bucket
    its pieces               w[2:3, 2:3]  w[3:4, :]  v[:]          flat_rectangles, each with an offset and strides

Parameters are whole segments, or shards under ZeRO-3; gradients before the update and optimizer states are shards as
soon as anything is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.layout.axes import Coordinates
from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import Rectangle, flat_rectangles, full
from meshwright.plan.buckets import Bucket, Segment, sharding_group, stage_buckets
from meshwright.plan.plan import Plan

__all__ = ["PiecesOf", "Placed", "layout_of", "parameter_pieces", "shard_bounds", "state_pieces", "unit_pieces"]


@dataclass(frozen=True, slots=True)
class Placed:
    """A piece, and where its elements lie: element i of it at offset + Σ i[d]·strides[d] of the bucket's flat memory.

    `offset` counts from the start of the bucket where `sharded` is False, else from the start of this rank's shard.
    """

    piece: Piece
    bucket: int
    offset: int
    strides: tuple[int, ...]
    sharded: bool


PiecesOf = Callable[[Plan, int], tuple[Placed, ...]]
"""(plan, rank) -> what the rank holds of some kind of tensor."""


def parameter_pieces(plan: Plan, rank: int) -> tuple[Placed, ...]:
    """What `rank` keeps of the parameters between steps."""
    return _pieces(plan, rank, sharded=plan.sharding.stage == 3)


def state_pieces(plan: Plan, rank: int) -> tuple[Placed, ...]:
    """What `rank` holds of every gradient before the update, of the optimizer's states and of the master copy."""
    return _pieces(plan, rank, sharded=plan.sharding.stage >= 1)


def unit_pieces(plan: Plan, rank: int) -> tuple[Placed, ...]:
    """What `rank` holds of the parameters while their unit runs: whole segments at every ZeRO stage."""
    return _pieces(plan, rank, sharded=False)


def layout_of(plan: Plan, pieces: PiecesOf = parameter_pieces) -> dict[int, tuple[Piece, ...]]:
    """The pieces of all ranks, as `layout.moves` takes them: rank -> pieces, ranks ascending."""
    return {rank: tuple(placed.piece for placed in pieces(plan, rank)) for rank in range(plan.degrees.ranks)}


def shard_bounds(plan: Plan, bucket: Bucket, rank: int) -> tuple[int, int]:
    """The elements of `bucket` that `rank` updates: all of them where nothing is sharded."""
    if not plan.sharding.stage:
        return 0, bucket.numel
    group = sharding_group(plan, bucket.replicas)
    return bucket.shard(group.size, group.place(plan.degrees, plan.degrees.coordinates(rank)))


def _pieces(plan: Plan, rank: int, sharded: bool) -> tuple[Placed, ...]:
    at = plan.degrees.coordinates(rank)
    out: list[Placed] = []
    for bucket in stage_buckets(plan, at.pp):
        low, high = shard_bounds(plan, bucket, rank) if sharded else (0, bucket.numel)
        for segment in bucket.segments:
            for rectangle, offset in _held(segment, low, high):
                piece = _unpadded(plan, at, segment, rectangle)
                if piece is not None:
                    out.append(Placed(piece, bucket.index, offset - low, _strides(segment.shape), sharded))
    return tuple(out)


def _held(segment: Segment, low: int, high: int) -> Iterator[tuple[Rectangle, int]]:
    """The part of a segment within [low, high) of its bucket: rectangles of the stored box, offsets in the bucket."""
    first, last = max(low, segment.offset), min(high, segment.stop)
    if (first, last) == (segment.offset, segment.stop):
        yield full(segment.shape), segment.offset
        return
    for rectangle, offset in flat_rectangles(segment.shape, first - segment.offset, last - segment.offset):
        yield rectangle, segment.offset + offset


def _unpadded(plan: Plan, at: Coordinates, segment: Segment, stored: Rectangle) -> Piece | None:
    """The logical piece that a rectangle of the stored box is, without the padding of an uneven cut."""
    mine = segment.owner.rectangle(plan.degrees, at)
    real = stored.intersect(full(mine.extent))
    if real is None:
        return None
    start = tuple(outer + inner for outer, inner in zip(mine.start, real.start, strict=True))
    return Piece(segment.name, Rectangle(start, real.extent))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
