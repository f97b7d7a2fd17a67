"""Live memory: states and buckets to the byte, activations by the table of the architecture."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from meshwright.arch.activations import Setting, saved_bytes
from meshwright.arch.arch import Experts
from meshwright.config.choices import Dtype, OptimizerKind, Recompute, Schedule
from meshwright.plan.action import Kind, Op
from meshwright.plan.buckets import stage_buckets
from meshwright.plan.folds.memory import Category, Event, Timeline, memory
from meshwright.plan.folds.setting import narrowed
from meshwright.plan.folds.sizes import graph_sizes
from meshwright.plan.folds.traffic import Transport
from meshwright.plan.plan import Optimizer, Plan, Precision
from meshwright.plan.program import program
from meshwright.plan.strategies.expert import Exchange, Routed, everywhere, fullest_exchange
from tests.unit.plan.plans import make_arch, make_plan
from tests.unit.plan.programs import plans

MIXED = Precision(Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.FLOAT32)


def psi(plan: Plan) -> int:
    return sum(bucket.numel for bucket in stage_buckets(plan, 0))


def live(timeline: Timeline, index: int, category: Category) -> int:
    """Bytes after the action `index`."""
    changes = (event.change for event in timeline.events if event.index <= index and event.category is category)
    return timeline.states[category] + sum(changes)


@pytest.mark.parametrize(
    ("zero", "parameters", "optimizer", "master", "gradients"),
    [(0, 2, 8, 4, 4), (1, 2, 8 / 4, 4 / 4, 4), (2, 2, 8 / 4, 4 / 4, None), (3, 2 / 4, 8 / 4, 4 / 4, None)],
)
def test_states_in_bytes_a_parameter(
    zero: int, parameters: float, optimizer: float, master: float, gradients: float | None
) -> None:
    """bfloat16 with float32 gradients, moments and master copy on four ranks: 18, and 6 + 12 / 4, and so on."""
    plan = make_plan(layers=3, dp=4, zero=zero, precision=MIXED)
    timeline = memory(plan, 1)
    size = psi(plan)
    assert timeline.states[Category.PARAMETERS] == parameters * size
    assert timeline.states[Category.OPTIMIZER] == optimizer * size
    assert timeline.states[Category.MASTER] == master * size
    if gradients is not None:
        assert timeline.largest[Category.GRADIENTS] == gradients * size


def test_norms_of_queries_and_keys_are_cut_along_the_heads_alone() -> None:
    """They counted half of what a tensor rank keeps under sequence parallel, as if they were cut along tokens too."""
    bare = make_arch(heads=8, kv_heads=4, rope=None)
    setting = Setting(2, 16, fused_norms=True, gathers=True, ways=2)
    normed, plain = (
        sum(graph_sizes(narrowed(each, 2), 1, setting, Dtype.BFLOAT16).values())
        for each in (replace(bare, qk_norm=True), bare)
    )
    assert normed - plain == setting.tokens * (4 + 2) * (2 * bare.head_dim + 4)  # an input, a float32 scale a head


def test_no_master_copy_and_no_moments_where_there_are_none() -> None:
    states = memory(make_plan(optimizer=Optimizer(kind=OptimizerKind.SGD)), 0).states
    assert (states[Category.OPTIMIZER], states[Category.MASTER]) == (0, 0)


@pytest.mark.parametrize("zero", [2, 3])
def test_unreduced_gradients_of_at_most_two_units(zero: int) -> None:
    plan = make_plan(layers=6, dp=2, zero=zero, accumulation=2)
    sizes = sorted(bucket.numel for bucket in stage_buckets(plan, 0))
    shards = 4 * psi(plan) // 2
    assert memory(plan, 0).largest[Category.GRADIENTS] <= shards + 4 * (sizes[-1] + sizes[-2])


def test_gathered_parameters_of_at_most_three_units() -> None:
    plan = make_plan(layers=6, dp=2, zero=3, accumulation=2)
    sizes = sorted(bucket.numel for bucket in stage_buckets(plan, 0))
    timeline = memory(plan, 0)
    assert timeline.largest[Category.PARAMETERS] - timeline.states[Category.PARAMETERS] <= 4 * sum(sizes[-3:])


def test_activations_are_the_table_of_the_architecture() -> None:
    """After the last forward of a micro-batch everything is kept: all units, once."""
    plan = make_plan(layers=3, micro=2)
    head = next(i for i, a in enumerate(program(plan, 0).actions) if a.op is Op.BACKWARD) - 1
    timeline = memory(plan, 0)
    setting = Setting(2, 32, fused_norms=True)
    table = [saved_bytes(plan.arch, unit, setting, Dtype.FLOAT32) for unit in range(plan.arch.num_units)]
    assert live(timeline, head, Category.ACTIVATIONS) + live(timeline, head, Category.LOGITS) == sum(table)


def test_recomputation_keeps_inputs_and_one_block() -> None:
    plan = make_plan(layers=6, recompute=Recompute.FULL)
    block = saved_bytes(plan.arch, 1, Setting(1, 32, fused_norms=True), Dtype.FLOAT32)
    hidden = 32 * 64 * 4
    head = saved_bytes(plan.arch, plan.arch.head_unit, Setting(1, 32, fused_norms=True), Dtype.FLOAT32)
    assert memory(plan, 0).largest[Category.ACTIVATIONS] <= 6 * hidden + max(block, head)
    assert memory(make_plan(layers=6), 0).largest[Category.ACTIVATIONS] > 6 * block


@pytest.mark.parametrize(("schedule", "flying"), [(Schedule.NAIVE, 1), (Schedule.GPIPE, 8), (Schedule.ONE_F_ONE_B, 4)])
def test_micro_batches_in_flight_on_the_first_stage(schedule: Schedule, flying: int) -> None:
    plan = make_plan(layers=4, pp=4, accumulation=8, schedule=schedule)
    block = saved_bytes(plan.arch, 1, Setting(1, 32, fused_norms=True), Dtype.FLOAT32)
    largest = memory(plan, 0).largest[Category.ACTIVATIONS]
    assert flying * block <= largest <= flying * block + 3 * 32 * 64 * 4


def test_a_direct_reduce_scatter_holds_what_arrives() -> None:
    plan = make_plan(dp=4, zero=1, layers=1)
    steps = program(plan, 0)
    for index, action in enumerate(steps.actions):
        if action.op is Op.SUM and action.bucket >= 0:
            arriving = Event(index, Category.BUFFERS, 4 * steps.buckets[action.bucket].numel * 3 // 4)
            assert arriving in memory(plan, 0, transport=Transport.DIRECT).events
            assert arriving not in memory(plan, 0, transport=Transport.NCCL).events


@settings(max_examples=60, deadline=None)
@given(plans())
def test_a_step_gives_back_all_it_took(plan: Plan) -> None:
    for kind in Kind:
        for rank in range(0, plan.degrees.ranks, plan.degrees.dp):
            timeline = memory(plan, rank, kind)
            for category in Category:
                changes = [event.change for event in timeline.events if event.category is category]
                assert sum(changes) == 0, category
            assert timeline.peak_bytes >= sum(timeline.states.values())
            assert sum(timeline.at_peak.values()) == timeline.peak_bytes


def test_what_experts_keep_does_not_fall_with_their_axis() -> None:
    """B87: every rank brings tokens of its own. What was observed, and all tokens at once, are counted as they are."""

    def kept(routed: Routed | None = None, **degrees: int) -> int:
        plan = make_plan(arch={"experts": Experts(8, 2, 64)}, micro=2, **degrees)
        return memory(plan, plan.degrees.ranks - 1, routed=routed).largest[Category.ACTIVATIONS]

    rows = 2 * 32 * 2  # of a micro-batch of 64 tokens
    assert kept(dp=4) == kept(dp=2, ep=2) == kept(ep=4)
    none, more = (kept(everywhere(Exchange(1, (rows, 0), (came, 0))), ep=2) for came in (0, rows + 1))
    of_a_row = 4 * (64 + 4 * 64)  # what enters an expert, and four tensors of its width
    assert more - kept(ep=2) == 2 * of_a_row  # blocks
    assert kept(ep=2) - none == 2 * of_a_row * rows
    plan = make_plan(arch={"experts": Experts(8, 2, 64)}, micro=2, ep=2)
    assert kept(everywhere(fullest_exchange(plan, 1)), ep=2) - kept(ep=2) == 2 * of_a_row * rows
    assert fullest_exchange(plan, 1) == Exchange(1, (0, rows), (rows, rows))
    one_each = make_plan(arch={"experts": Experts(4, 3, 64)}, micro=2, ep=4)
    assert fullest_exchange(one_each, 0) == Exchange(0, (64, 43, 43, 42), (64, 64, 64, 64))
