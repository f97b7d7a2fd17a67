"""Programs in English."""

from __future__ import annotations

import pytest

from meshwright.config.choices import Recompute, Schedule
from meshwright.plan.action import Kind
from meshwright.plan.folds.narrate import describe_rank, narrate
from meshwright.plan.folds.words import units_in_words
from meshwright.plan.program import program
from tests.unit.plan.plans import make_arch, make_plan


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ((0,), "embedding"),
        ((1,), "layer 0"),
        ((0, 1, 2, 3), "embedding, layers 0-2"),
        ((2, 4, 5), "layer 1, layers 3-4"),
        ((5, 6), "layer 4, head"),
        ((0, 6), "embedding, head"),
        ((), ""),
    ],
)
def test_runs_of_units(units: tuple[int, ...], words: str) -> None:
    assert units_in_words(make_arch(layers=5), units) == words


def test_a_step_line_by_line() -> None:
    plan = make_plan(dp=2, pp=2, zero=2, recompute=Recompute.FULL)
    text = list(narrate(plan, 0))
    size = 4 * program(plan, 0).buckets[1].numel
    told = [line.split("  ", 1)[1] for line in text]
    assert len(told) == len(program(plan, 0).actions)
    assert told[0] == "count of trained tokens (all_reduce of 8 bytes over batch, 2 ranks)"
    assert told[1] == "wait for the count of trained tokens"
    for line in (
        "forward of micro-batch 0, layer 0, keeping no graph",
        "send of the activation of micro-batch 0 to stage 1 (8192 bytes)",
        "receive of the cotangent of micro-batch 0 from stage 1",
        "recomputation of micro-batch 0, layer 0",
        "backward of micro-batch 0, embedding",
        f"sum of bucket 1, layer 0 (reduce_scatter of {size} bytes over dense, 2 ranks)",
        "sum of the loss over pp (all_reduce of 8 bytes over pp, 2 ranks)",
        "update of bucket 1, layer 0",
        f"publish of bucket 1, layer 0 (all_gather of {size} bytes over dense, 2 ranks)",
    ):
        assert line in told


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("schedule", [Schedule.NAIVE, Schedule.GPIPE, Schedule.ONE_F_ONE_B])
def test_every_action_has_words(kind: Kind, schedule: Schedule) -> None:
    plan = make_plan(layers=4, dp=2, pp=2, zero=3, accumulation=2, schedule=schedule, arch={"tie_embeddings": True})
    for rank in range(4):
        assert all(line.strip() for line in narrate(plan, rank, kind))


def test_what_a_rank_is() -> None:
    plan = make_plan(layers=3, dp=4, pp=2, zero=2, within=2, accumulation=3, micro=2)
    told = list(describe_rank(plan, 5))
    assert told[0] == "rank 5 of 8: pp 1 of 2, dp 1 of 4"
    assert told[1] == "units: layer 2, head"
    assert told[2] == "each step: 3 micro-batches of 2 sequences"
    assert "group shard: ranks 4, 5" in told
    assert "group copy: ranks 5, 7" in told
    assert "group pp: ranks 1, 5" in told
    bucket = program(plan, 5).buckets[0]
    half = bucket.numel // 2
    assert (
        f"bucket 0: layer 2, {bucket.numel} elements, shard {half} to {bucket.numel}, summed over shard, then copy"
    ) in told
    assert told[-1] == "stage 0: 3 sends, 3 receives a step"
