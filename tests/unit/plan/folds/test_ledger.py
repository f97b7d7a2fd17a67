"""The ledger against closed forms: what one step sends, to the byte and the call."""

from __future__ import annotations

import pytest

from meshwright.config.choices import Dtype, Recompute
from meshwright.layout.groups import GroupName
from meshwright.plan.action import Kind, Phase
from meshwright.plan.buckets import stage_buckets
from meshwright.plan.folds.ledger import Row, ledger
from meshwright.plan.folds.traffic import Operation, Transport
from meshwright.plan.norm import NORM_FLOATS
from meshwright.plan.plan import Plan, Precision
from tests.unit.plan.plans import make_plan


def psi(plan: Plan, stage: int = 0) -> int:
    """Elements of all buckets of a stage, padding included."""
    return sum(bucket.numel for bucket in stage_buckets(plan, stage))


def rows(plan: Plan, rank: int = 0, transport: Transport = Transport.DIRECT) -> dict[tuple[str, str, str], Row]:
    table = ledger(plan, rank, transport=transport)
    return {(row.group.value, row.operation.value, row.phase.value): row for row in table}


def of_parameters(plan: Plan, transport: Transport = Transport.DIRECT) -> int:
    """Wire bytes of everything that carries gradients or parameters."""
    small = {Phase.COUNT, Phase.NORM}
    return sum(row.wire_bytes for row in ledger(plan, 0, transport=transport) if row.phase not in small)


def test_one_rank_sends_nothing() -> None:
    assert ledger(make_plan(accumulation=3), 0) == ()


def test_the_whole_ledger_of_two_ranks_at_stage_0() -> None:
    plan = make_plan(dp=2, accumulation=4)
    size = 4 * psi(plan)
    everyone = 2
    assert ledger(plan, 1) == (
        Row(GroupName.BATCH, everyone, Operation.ALL_REDUCE, Phase.COUNT, 1, 8, 8, 8),
        Row(GroupName.DENSE, everyone, Operation.ALL_REDUCE, Phase.REDUCE, 4, size, size, size),
        Row(GroupName.TOKENS, everyone, Operation.ALL_REDUCE, Phase.COUNT, 1, 8, 8, 8),
        Row(GroupName.WORLD, everyone, Operation.ALL_REDUCE, Phase.NORM, 1, 8 * NORM_FLOATS, 32, 32),
    )


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("micros", [1, 3])
def test_wire_volume_of_each_stage(ways: int, micros: int) -> None:
    """Rajbhandari et al. 2020, section 7: 2, 2, m + 1 and 3m parameter volumes, times (n - 1) / n.

    At stage 3 the embedding's backward reads no weight, and the head's backward follows its forward: each is gathered
    once a micro-batch. The last block's backward follows the head's, so it is gathered again.
    """
    volume = {zero: of_parameters(make_plan(dp=ways, zero=zero, accumulation=micros)) for zero in range(4)}
    plan = make_plan(dp=ways, zero=3, accumulation=micros)
    embedding, *blocks, head = (bucket.numel for bucket in stage_buckets(plan, 0))
    whole = psi(plan)

    def on_wire(elements: int) -> int:
        return 4 * elements * (ways - 1) // ways

    assert volume[0] == 2 * on_wire(psi(make_plan(dp=ways)))
    assert volume[1] == 2 * on_wire(whole)
    assert volume[2] == (micros + 1) * on_wire(whole)
    assert volume[3] == micros * on_wire(whole + 2 * sum(blocks) + head + embedding)


def test_gloo_moves_an_all_reduce_for_a_reduce_scatter() -> None:
    plan = make_plan(dp=4, zero=1)
    gloo, direct = (
        rows(plan, transport=each)["dense", "reduce_scatter", "reduce"] for each in (Transport.GLOO, Transport.DIRECT)
    )
    assert gloo.sent_bytes == direct.sent_bytes == direct.wire_bytes == 3 * psi(plan)
    assert gloo.wire_bytes == 2 * direct.wire_bytes


def test_precision_sets_the_width_of_what_travels() -> None:
    plan = make_plan(dp=2, zero=2, pp=2, precision=Precision(Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.FLOAT32))
    table = rows(plan)
    assert table["dense", "reduce_scatter", "reduce"].payload_bytes == 4 * psi(plan)
    assert table["dense", "all_gather", "update"].payload_bytes == 2 * psi(plan)
    assert table["pp", "send", "forward"].payload_bytes == 2 * 32 * 64


def test_a_pipeline_sends_one_way_each_way() -> None:
    plan = make_plan(pp=3, layers=3, accumulation=5, micro=2)
    message = 2 * 32 * 64 * 4
    for rank, forward, backward in ((0, 5, 0), (1, 5, 5), (2, 0, 5)):
        table = rows(plan, rank)
        for phase, calls in (("forward", forward), ("backward", backward)):
            row = table.get(("pp", "send", phase))
            seen = (row.calls, row.payload_bytes, row.sent_bytes, row.wire_bytes) if row else (0, 0, 0, 0)
            assert seen == (calls, calls * message, calls * message, calls * message)


def test_hybrid_copies_carry_only_the_shard() -> None:
    plan = make_plan(dp=4, zero=2, within=2, accumulation=2)
    table = rows(plan)
    assert table["shard", "reduce_scatter", "reduce"].payload_bytes == 2 * 4 * psi(plan)
    assert table["copy", "all_reduce", "reduce"].payload_bytes == 4 * psi(plan) // 2
    assert table["shard", "all_gather", "update"].payload_bytes == 4 * psi(plan)


@pytest.mark.parametrize(("zero", "part"), [(0, 1), (1, 2), (2, 2), (3, 2)])
def test_a_tied_tensor_is_summed_over_its_stages_on_what_is_left(zero: int, part: int) -> None:
    plan = make_plan(dp=2, pp=2, zero=zero, arch={"tie_embeddings": True})
    (tied,) = (bucket for bucket in stage_buckets(plan, 1) if bucket.tied)
    row = rows(plan, 3)["tied", "all_reduce", "reduce"]
    assert (row.calls, row.payload_bytes) == (1, 4 * tied.numel // part)


def test_recomputed_blocks_are_gathered_for_the_backward_alone() -> None:
    """The recomputation and the backward after it share one gather, in the backward phase."""
    kept, again = (make_plan(dp=2, zero=3, layers=3, recompute=each) for each in (Recompute.NONE, Recompute.FULL))
    assert ledger(kept, 0) == ledger(again, 0)


def test_an_evaluation_sends_no_gradients() -> None:
    plan = make_plan(dp=2, pp=2, zero=2, accumulation=2)
    table = {(row.group.value, row.phase.value): row.calls for row in ledger(plan, 0, Kind.EVALUATE)}
    assert table == {("batch", "count"): 1, ("pp", "forward"): 2, ("tokens", "count"): 1, ("pp", "count"): 1}


def test_sent_bytes_are_rounded_down_call_by_call() -> None:
    """8 bytes over 3 ranks: 2 * 2 / 3 * 8 = 10.67 a call."""
    assert rows(make_plan(dp=3))["batch", "all_reduce", "count"].sent_bytes == 10
