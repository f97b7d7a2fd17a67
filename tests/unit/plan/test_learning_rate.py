"""Steps are optimizer steps, nothing else: the rate never counts micro-batches or ranks, and never leaves its floor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.arch.resolve import arch_from_model
from meshwright.config.choices import LearningRateSchedule
from meshwright.config.errors import RequestError
from meshwright.config.load import load_run
from meshwright.plan.learning_rate import learning_rate
from meshwright.plan.plan import Optimizer
from meshwright.plan.resolve import resolve, steps_of

PLAIN = Optimizer(learning_rate=1.0, min_learning_rate=0.0, warmup_steps=0, steps=100)


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_cosine_after_a_quarter_is_the_same_on_every_layout(dp: int, accumulation: int) -> None:
    """B70: the schedule once ran as many times too fast as there were ranks."""
    run = load_run(
        overrides=[
            f"mesh.dp={dp}", f"batch.global={4 * dp * accumulation}", "train.steps=100", "optimizer.warmup_steps=0",
            "optimizer.learning_rate=1.0", "optimizer.min_learning_rate=0.0",
        ]
    )  # fmt: skip
    plan = resolve(run, arch_from_model(run.model))
    assert plan.accumulation == accumulation
    assert learning_rate(plan.optimizer, 25) == pytest.approx(0.8535534, abs=5e-8)
    assert steps_of(run) == 100


@pytest.mark.parametrize("schedule", LearningRateSchedule)
def test_past_the_end_the_rate_is_the_final_one_and_never_negative(schedule: LearningRateSchedule) -> None:
    """B09: a schedule in micro-batches fell below zero, and the ruined weights were saved as a success."""
    optimizer = replace(PLAIN, schedule=schedule, steps=10, warmup_steps=2)
    rates = [learning_rate(optimizer, step) for step in range(80)]
    final = 1.0 if schedule is LearningRateSchedule.CONSTANT else 0.0
    assert rates[:2] == [0.5, 1.0]
    assert rates[10:] == [final] * 70
    assert min(rates) >= 0.0


def test_linear_meets_its_ends() -> None:
    optimizer = replace(PLAIN, schedule=LearningRateSchedule.LINEAR, min_learning_rate=0.1)
    assert [learning_rate(optimizer, step) for step in (0, 50, 100)] == pytest.approx([1.0, 0.55, 0.1], rel=1e-15)


def test_a_warm_up_as_long_as_the_run_stays_a_warm_up() -> None:
    optimizer = replace(PLAIN, steps=4, warmup_steps=8)
    assert [learning_rate(optimizer, step) for step in range(4)] == [1 / 8, 2 / 8, 3 / 8, 4 / 8]


def test_a_part_of_a_window_is_refused_before_the_run() -> None:
    """B08: the last, shorter window of 7 micro-batches in fours was dropped, or divided by the full count."""
    run = load_run(overrides=["mesh.dp=1", "batch.global=7", "batch.micro=2"])
    with pytest.raises(RequestError, match="must be a multiple of micro") as caught:
        resolve(run, arch_from_model(run.model))
    assert {"batch.global = 8", "batch.global = 6"} <= set(caught.value.nearest)


def test_tokens_become_whole_steps() -> None:
    run = load_run(overrides=["train.tokens=10000", "batch.global=16", "data.sequence_length=128"])
    assert steps_of(run) == 5  # 2,048 tokens a step
