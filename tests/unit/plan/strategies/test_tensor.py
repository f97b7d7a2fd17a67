"""Tensor parallelism, declared: cuts by meaning, partial gradients, refusals, and what a unit sends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from meshwright.arch.arch import Arch, Norm
from meshwright.config.choices import Schedule
from meshwright.config.errors import RequestError
from meshwright.layout.axes import Degrees
from meshwright.layout.groups import GroupName
from meshwright.layout.ownership import Ownership
from meshwright.plan.action import COMPUTE, Action, Op, Phase
from meshwright.plan.buckets import stage_buckets
from meshwright.plan.folds.ledger import ledger
from meshwright.plan.operation import Operation
from meshwright.plan.owners import owners
from meshwright.plan.plan import Plan
from meshwright.plan.program import program
from meshwright.plan.rules import check_plan
from meshwright.plan.strategies.calls import unit_calls
from meshwright.plan.strategies.tensor import kv_copies, legal_degrees
from meshwright.plan.warnings import plan_warnings
from tests.unit.plan.plans import make_plan

GPT2 = {"norm": Norm.LAYER, "gated": False, "rope": None, "max_positions": 40, "qkv_bias": True, "output_bias": True,
        "mlp_bias": True, "tie_embeddings": True}  # fmt: skip


def plan_of(tp: int, sequence: bool = False, arch: dict[str, Any] | None = None, **fields: Any) -> Plan:
    plan = make_plan(tp=tp, arch=arch, **fields)
    return replace(plan, execution=replace(plan.execution, sequence=sequence))


def of(plan: Plan) -> dict[str, Ownership]:
    """Owners of everything but the second block, by a short name."""
    return {owner.tensor.name.removeprefix("layers.0."): owner for owner in owners(plan)}


@pytest.mark.parametrize("tp", [2, 4])
def test_the_pieces_of_all_ranks_tile_every_tensor(tp: int) -> None:
    """Each element is owned by exactly one rank, whatever the copies."""
    plan = plan_of(tp, arch={"qkv_bias": True, "qk_norm": True})
    for owner in owners(plan):
        owned = Counter[tuple[int, ...]]()
        for rank in range(tp):
            at = plan.degrees.coordinates(rank)
            box = owner.rectangle(plan.degrees, at)
            assert all(size <= local for size, local in zip(box.extent, owner.local_shape(plan.degrees), strict=True))
            if owner.owns(plan.degrees, at):
                owned[box.start] += box.numel
        assert sum(owned.values()) == owner.tensor.numel, owner.tensor.name


def test_cuts_follow_from_what_a_dimension_means() -> None:
    shapes = {name: owner.local_shape(Degrees(tp=4)) for name, owner in of(plan_of(4, arch={"qkv_bias": True})).items()}
    assert shapes["embedding.weight"] == shapes["head.weight"] == (65, 64)  # 257 padded to 260
    assert shapes["attention.query.weight"] == (16, 64)
    assert shapes["attention.query.bias"] == (16,)
    assert shapes["attention.key.weight"] == (16, 64)  # two heads for four ranks: each holds one
    assert shapes["attention.output.weight"] == (64, 16)
    assert shapes["mlp.gate.weight"] == (32, 64)
    assert shapes["mlp.down.weight"] == (64, 32)
    assert shapes["attention_norm.weight"] == (64,)


def test_neighbours_hold_the_same_key_heads() -> None:
    plan = plan_of(4)
    key = of(plan)["attention.key.weight"]
    starts = [key.rectangle(plan.degrees, plan.degrees.coordinates(rank)).start for rank in range(4)]
    assert starts == [(0, 0), (0, 0), (16, 0), (16, 0)]
    assert [key.owns(plan.degrees, plan.degrees.coordinates(rank)) for rank in range(4)] == [True, False, True, False]
    assert (kv_copies(plan.degrees, plan.arch), key.partial) == (2, (GroupName.KV_COPY,))


def test_the_last_rank_of_an_uneven_vocabulary_holds_fewer_rows() -> None:
    plan = plan_of(4, arch={"vocab": 101})
    table = of(plan)["embedding.weight"]
    rows = [table.rectangle(plan.degrees, plan.degrees.coordinates(rank)).extent[0] for rank in range(4)]
    assert rows == [26, 26, 26, 23]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("arch", [{}, {"qk_norm": True, "qkv_bias": True}, GPT2], ids=["llama", "qwen", "gpt2"])
def test_gradients_are_partial_by_ownership_and_features(sequence: bool, arch: dict[str, Any]) -> None:
    """Cut tensors never; gains inside heads always; what acts on the stream where each rank has tokens of its own."""
    plan = plan_of(2, sequence, arch)
    for name, owner in of(plan).items():
        in_heads = name.endswith(("query_norm.weight", "key_norm.weight"))
        on_stream = not owner.cuts and not in_heads and name != "embedding.positions"
        assert owner.partial == ((GroupName.TP,) if in_heads or (sequence and on_stream) else ()), name


def test_partial_gradients_have_buckets_of_their_own_and_are_summed_once() -> None:
    plan = plan_of(4, True, {"qkv_bias": True}, dp=2, zero=2, accumulation=3)
    held = stage_buckets(plan, 0)
    assert all(len({segment.owner.partial for segment in bucket.segments}) == 1 for bucket in held)
    sums = [a for a in program(plan, 0).actions if a.op is Op.SUM and a.group in (GroupName.TP, GroupName.KV_COPY)]
    assert sorted(a.bucket for a in sums) == [bucket.index for bucket in held if bucket.partial]


def calls(plan: Plan, unit: int, op: Op, split: bool = False) -> list[tuple[str, int]]:
    action = Action(op, Phase.FORWARD, unit, 0, split=split)
    return [(call.operation.value, call.payload_bytes) for call in unit_calls(plan, action)]


def test_a_block_sends_two_sums_each_way_or_their_two_halves() -> None:
    plain, cut = plan_of(2), plan_of(2, True)
    whole = 32 * 64 * 4
    for op in (Op.FORWARD, Op.BACKWARD, Op.RECOMPUTE):
        assert calls(plain, 1, op) == [("all_reduce", whole)] * 2
        assert sorted(calls(cut, 1, op)) == [("all_gather", whole)] * 2 + [("reduce_scatter", whole)] * 2
    assert calls(plain, 1, Op.WEIGHT) == calls(cut, 1, Op.WEIGHT) == []
    assert calls(plain, 1, Op.BACKWARD, split=True) == [("all_reduce", whole)] * 2


def test_embedding_and_head_send_hidden_states_and_three_numbers_a_token() -> None:
    whole, numbers = 32 * 64 * 4, 2 * 3 * 32 * 4
    assert calls(plan_of(2), 0, Op.FORWARD) == [("all_reduce", whole)]
    assert calls(plan_of(2), 0, Op.BACKWARD) == []
    assert calls(plan_of(2, True), 0, Op.BACKWARD) == [("all_gather", whole)]
    assert calls(plan_of(2, True), 0, Op.BACKWARD, split=True) == []
    assert calls(plan_of(2, True), 0, Op.WEIGHT) == [("all_gather", whole)]
    assert calls(plan_of(2), 3, Op.FORWARD) == [("all_gather", numbers)]
    assert calls(plan_of(2), 3, Op.BACKWARD) == [("all_reduce", whole)]
    assert calls(plan_of(2, True), 3, Op.FORWARD) == [("all_gather", whole), ("all_gather", numbers)]


def ring_of(tp: int, sequence: bool = True) -> Plan:
    plan = plan_of(tp, sequence)
    return replace(plan, execution=replace(plan.execution, asynchronous_tensor=True))


def test_round_a_ring_the_same_is_sent() -> None:
    assert ledger(ring_of(4), 0) == ledger(plan_of(4, True), 0)


def test_a_ring_needs_what_it_cuts() -> None:
    check_plan(ring_of(4))
    with pytest.raises(RequestError, match=r"what works: parallel\.sequence = true, parallel"):
        check_plan(ring_of(4, sequence=False))


def test_a_ring_on_processors_is_told() -> None:
    assert not plan_warnings(ring_of(4))
    (told,) = plan_warnings(ring_of(4), on_cpu=True)
    assert "gains nothing on CPUs" in told


def test_nothing_is_sent_without_the_axis() -> None:
    plan = make_plan(dp=2)
    assert not [call for a in program(plan, 0).actions if a.op in COMPUTE for call in unit_calls(plan, a)]


@pytest.mark.parametrize("sequence", [False, True])
def test_inside_units_no_payload_grows_with_vocabulary_or_weights(sequence: bool) -> None:
    small, large = (
        plan_of(2, sequence, {"vocab": vocab, "ffn": ffn}, zero=3, dp=2) for vocab, ffn in ((101, 64), (4001, 512))
    )
    rows = [[row for row in ledger(plan, 0) if row.group is GroupName.TP] for plan in (small, large)]
    assert rows[0] == rows[1] != []


def test_rows_of_the_axis_and_of_its_factor_are_one() -> None:
    """Under sequence parallel with copied heads, gains are summed over four ranks and keys over two: one row."""
    plan = plan_of(4, True)
    (row,) = (each for each in ledger(plan, 0) if each.phase is Phase.REDUCE)
    assert (row.group, row.ranks, row.operation) == (GroupName.TP, 4, Operation.ALL_REDUCE)
    buckets = [bucket for bucket in stage_buckets(plan, 0) if bucket.partial]
    over = {bucket.partial[0]: 0 for bucket in buckets}
    for bucket in buckets:
        over[bucket.partial[0]] += 4 * bucket.numel
    assert row.payload_bytes == sum(over.values())
    assert row.sent_bytes == over[GroupName.TP] * 6 // 4 + over[GroupName.KV_COPY]


@pytest.mark.parametrize(
    ("tp", "arch", "says"),
    [
        (3, {}, ["mesh.tp = 3", "4 query heads", "mesh.tp = 1", "mesh.tp = 2", "mesh.tp = 4"]),
        (2, {"heads": 6, "kv_heads": 3, "hidden": 96}, ["mesh.tp = 2", "3 key/value heads", "mesh.tp = 1"]),
        (4, {"ffn": 90}, ["mesh.tp = 4", "feed-forward width of 90", "mesh.tp = 2"]),
    ],
)
def test_what_does_not_divide_is_refused_with_both_numbers(tp: int, arch: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        check_plan(plan_of(tp, arch=arch))
    assert all(text in str(caught.value) for text in says), str(caught.value)


def test_more_ranks_than_key_heads_are_legal() -> None:
    arch = Arch("llama", layers=2, hidden=64, heads=8, kv_heads=2, head_dim=8, ffn=128, vocab=101)
    assert legal_degrees(arch) == (1, 2, 4, 8)
    assert legal_degrees(replace(arch, kv_heads=1)) == (1, 2, 4, 8)
    assert legal_degrees(replace(arch, heads=6, kv_heads=3, ffn=96)) == (1, 3, 6)
    check_plan(plan_of(4, arch={"kv_heads": 1}))


def test_an_odd_number_of_tokens_is_refused_with_the_nearest_length() -> None:
    plan = plan_of(4, True)
    odd = replace(plan, data=replace(plan.data, sequence_length=33))
    with pytest.raises(RequestError) as caught:
        check_plan(odd)
    says = ("sequence_length = 33", "33 tokens", "mesh.tp = 4", "sequence_length = 32", "parallel.sequence = false")
    assert all(text in str(caught.value) for text in says), str(caught.value)
    check_plan(replace(odd, batch=replace(odd.batch, sequences=4, micro=4)))  # 132 tokens
    check_plan(replace(odd, execution=replace(odd.execution, sequence=False)))


def test_a_border_carries_what_a_rank_holds_of_the_stream() -> None:
    for sequence, part in ((False, 1), (True, 2)):
        plan = plan_of(2, sequence, pp=2, schedule=Schedule.ONE_F_ONE_B)
        (row,) = (each for each in ledger(plan, 0) if each.operation is Operation.SEND)
        assert row.payload_bytes == 32 * 64 * 4 // part
