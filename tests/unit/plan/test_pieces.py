"""Placed pieces: every element of every logical tensor lies somewhere, has one owner, and is where it is said to be."""

import numpy as np
import pytest

from meshwright.arch.parameters import tensors
from meshwright.arch.tensors import LogicalAxis
from meshwright.layout.axes import Axis, whole
from meshwright.layout.moves import owned
from meshwright.layout.ownership import Cut, Ownership
from meshwright.plan import buckets, pieces
from meshwright.plan.buckets import stage_buckets
from meshwright.plan.pieces import Placed, layout_of, parameter_pieces, shard_bounds, state_pieces, unit_pieces
from meshwright.plan.plan import Plan
from meshwright.plan.stages import stage_of_unit
from tests.unit.plan.plans import make_plan

PLANS = [
    make_plan(dp=dp, zero=zero, within=within, pp=pp, arch={"tie_embeddings": tied}, micro=1, accumulation=2)
    for dp, zero, within, pp, tied in (
        (1, 0, 0, 1, False),
        (3, 0, 0, 1, True),
        (3, 1, 0, 1, False),
        (4, 2, 2, 1, True),
        (4, 3, 0, 1, False),
        (2, 3, 0, 2, True),
        (7, 3, 0, 1, True),
    )
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.degrees.dp}x{plan.degrees.pp} zero{plan.sharding}")
@pytest.mark.parametrize("of", [parameter_pieces, state_pieces, unit_pieces])
def test_every_element_has_one_owner(plan: Plan, of: pieces.PiecesOf) -> None:
    count = {tensor.name: np.zeros(tensor.shape, dtype=np.int64) for tensor in tensors(plan.arch)}
    for held in owned(layout_of(plan, of)).values():
        for piece in held:
            count[piece.tensor][_window(piece)] += 1
    assert all((times == 1).all() for times in count.values())


def test_shards_hold_their_share_and_copies_hold_all() -> None:
    plan = make_plan(dp=4, zero=1)
    sizes = [sum(placed.piece.rectangle.numel for placed in state_pieces(plan, rank)) for rank in range(4)]
    everything = sum(tensor.numel for tensor in tensors(plan.arch))
    assert sum(sizes) == everything
    padding = sum(bucket.numel for bucket in stage_buckets(plan, 0)) - everything
    assert max(sizes) - min(sizes) <= padding  # shards are equal but for what fills the buckets up
    for rank in range(4):
        assert sum(placed.piece.rectangle.numel for placed in parameter_pieces(plan, rank)) == everything


@pytest.mark.parametrize("zero", [0, 1])
def test_pieces_lie_where_they_are_said_to_lie_under_uneven_cuts(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """257 tokens and 4 heads of 16 over three tensor ranks: stored boxes are padded on dimension 0 and on dimension 1.

    Each rank's memory is filled through the stored boxes alone; read back through the placed pieces it must be the
    logical tensor.
    """
    plan = make_plan(dp=2, tp=3, zero=zero)
    monkeypatch.setattr(buckets, "owners", _cut_owners)
    monkeypatch.setattr(pieces, "stage_buckets", stage_buckets.__wrapped__)
    logical = {t.name: np.arange(t.numel, dtype=np.float64).reshape(t.shape) for t in tensors(plan.arch)}
    seen = {name: np.zeros(values.shape, dtype=np.int64) for name, values in logical.items()}
    for rank in range(6):
        memory = _memory(plan, rank, logical, sharded=zero > 0)
        for placed in state_pieces(plan, rank):
            got = _read(memory[placed.bucket], placed)
            assert np.array_equal(got, logical[placed.piece.tensor][_window(placed.piece)])
            seen[placed.piece.tensor][_window(placed.piece)] += 1
    copies = {name: int(times.max()) for name, times in seen.items()}
    assert all((times == times.flat[0]).all() for times in seen.values())
    assert copies["embedding.weight"] == (2 if zero == 0 else 1)
    assert copies["head.norm.weight"] == (6 if zero == 0 else 3)


def _cut_owners(plan: Plan) -> tuple[Ownership, ...]:
    meanings = {LogicalAxis.VOCABULARY, LogicalAxis.HEADS, LogicalAxis.FFN}
    stage, tp = stage_of_unit(plan), whole(plan.degrees, Axis.TP)
    return tuple(
        Ownership(
            tensor,
            stages=tuple(sorted({stage[reader] for reader in tensor.readers})),
            cuts=tuple(Cut(dim, tp) for dim, axis in enumerate(tensor.axes) if axis in meanings),
        )
        for tensor in tensors(plan.arch)
    )


def _memory(plan: Plan, rank: int, logical: dict[str, np.ndarray], sharded: bool) -> list[np.ndarray]:
    at = plan.degrees.coordinates(rank)
    out = []
    for bucket in pieces.stage_buckets(plan, at.pp):
        flat = np.full(bucket.numel, np.nan)
        for segment in bucket.segments:
            stored = np.full(segment.shape, np.nan)
            mine = segment.owner.rectangle(plan.degrees, at)
            window = tuple(slice(low, high) for low, high in zip(mine.start, mine.stop, strict=True))
            stored[tuple(slice(size) for size in mine.extent)] = logical[segment.name][window]
            flat[segment.offset : segment.stop] = stored.reshape(-1)
        low, high = shard_bounds(plan, bucket, rank) if sharded else (0, bucket.numel)
        out.append(flat[low:high])
    return out


def _read(flat: np.ndarray, placed: Placed) -> np.ndarray:
    bytes_each = tuple(8 * stride for stride in placed.strides)
    return np.lib.stride_tricks.as_strided(flat[placed.offset :], placed.piece.rectangle.extent, bytes_each)


def _window(piece: pieces.Piece) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(piece.rectangle.start, piece.rectangle.stop, strict=True))
