"""Pipelines in closed form: textbook bubbles, uneven stages, what is in flight."""

import numpy as np
import pytest

from meshwright.config.choices import Schedule
from meshwright.price.layouts import SCHEDULES, Layouts, even_stages, layouts
from meshwright.price.schedule import Stages, in_flight, pipeline_seconds
from meshwright.price.simulate import simulated
from tests.unit.price.ask import ask


def one(schedule: Schedule, pp: int, micros: int, chunks: int = 1) -> Layouts:
    return layouts(pp * chunks, pp=pp, chunks=chunks, sequences=micros, schedule=SCHEDULES.index(schedule))


NONE = np.zeros(1), np.zeros(1)


def stages(pp: int, forward: float = 1.0, backward: float = 2.0) -> Stages:
    pair = np.array([forward]), np.array([backward])
    return Stages(pair, NONE, pair if pp > 2 else NONE, pair, (pp * pair[0], pp * pair[1]))


@pytest.mark.parametrize(
    ("schedule", "chunks", "bubble"),
    [(Schedule.ONE_F_ONE_B, 1, 3 / 8), (Schedule.GPIPE, 1, 3 / 8), (Schedule.INTERLEAVED, 2, 3 / 16)],
)
def test_bubbles_are_those_of_the_papers(schedule: Schedule, chunks: int, bubble: float) -> None:
    """(p - 1) / m, interleaved (p - 1) / (v m), of the work."""
    seconds = pipeline_seconds(one(schedule, 4, 8, chunks), stages(4), np.zeros(1))[0]
    assert seconds == pytest.approx(8 * 3.0 * (1 + bubble))


def test_naive_runs_one_micro_batch_after_the_other() -> None:
    assert pipeline_seconds(one(Schedule.NAIVE, 4, 8), stages(4), np.zeros(1))[0] == 8 * 4 * 3.0


def test_the_slowest_stage_sets_the_pace() -> None:
    pair, slow = (np.array([1.0]), np.array([2.0])), (np.array([2.0]), np.array([4.0]))
    whole = np.array([2 + 1 + 1 + 1.0]), np.array([4 + 2 + 2 + 2.0])
    uneven = Stages(slow, NONE, pair, pair, whole)
    seconds = pipeline_seconds(one(Schedule.ONE_F_ONE_B, 4, 32), uneven, np.zeros(1))[0]
    assert seconds >= 32 * 6.0


@pytest.mark.parametrize("micros", [1, 2, 4, 8, 64])
def test_more_micro_batches_take_longer_and_waste_less(micros: int) -> None:
    now = pipeline_seconds(one(Schedule.ONE_F_ONE_B, 4, micros), stages(4), np.full(1, 0.1))[0]
    more = pipeline_seconds(one(Schedule.ONE_F_ONE_B, 4, 2 * micros), stages(4), np.full(1, 0.1))[0]
    assert now < more < 2 * now


def test_what_is_in_flight() -> None:
    """The first 1F1B stage holds p micro-batches: its activations do not fall with p (a known mistake)."""
    first, last = np.zeros(1), np.array([7.0])
    assert in_flight(one(Schedule.ONE_F_ONE_B, 8, 64), first)[0] == 8
    assert in_flight(one(Schedule.ONE_F_ONE_B, 8, 64), last)[0] == 1
    assert in_flight(one(Schedule.GPIPE, 8, 64), first)[0] == 64
    assert in_flight(one(Schedule.NAIVE, 8, 64), first)[0] == 1
    assert in_flight(one(Schedule.INTERLEAVED, 8, 64, 3), first)[0] == pytest.approx(8 * (1 + 7 / 24))
    assert in_flight(one(Schedule.ONE_F_ONE_B, 8, 3), first)[0] == 3


@pytest.mark.parametrize(
    ("blocks", "pp", "chunks", "held"),
    [(96, 8, 1, (12, 12, 12)), (70, 12, 1, (5, 6, 5)), (126, 16, 8, (7, 8, 7)), (32, 1, 1, (32, 0, 32))],
)
def test_blocks_of_even_stages(blocks: int, pp: int, chunks: int, held: tuple[int, int, int]) -> None:
    found = even_stages(blocks, np.array([float(pp)]), np.array([float(chunks)]))
    assert tuple(int(each[0]) for each in found) == held


@pytest.mark.parametrize("pp", [2, 4])
def test_a_v_leads_back_to_the_first_stage(pp: int) -> None:
    """The head of ZB-V is on the rank of the embedding. It was priced on the last one: 14 % too slow."""
    words = ("model.preset=llama3-8b", "data.sequence_length=2048", "batch.micro=1", "batch.global=64",
             f"mesh.pp={pp}", "parallel.schedule=zb-v", "parallel.chunks=2", "precision.compute=bfloat16")  # fmt: skip
    price = ask(*words, "mesh.dp=1", cluster="local")
    closed = float(price.estimates.times.step[0])
    assert closed == pytest.approx(simulated(price.plan, price.cluster).step_seconds, rel=0.01)
    parts = price.parts
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(price.step_seconds)
    usual = ask(*words, "mesh.dp=1")
    memory = usual.estimates.memory
    assert float(memory.peaks_first[0]) > float(memory.peaks_last[0])


@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", 1), ("zb-v", 2)])
@pytest.mark.parametrize(("pp", "micros"), [(2, 1), (3, 2), (4, 1), (4, 3), (4, 6), (8, 1), (8, 5)])
def test_a_pipeline_that_is_not_full_waits(schedule: str, chunks: int, pp: int, micros: int) -> None:
    """It was priced as full at any number of micro-batches: 2.3 times too fast for a V of four stages with one."""
    words = ("model.preset=llama3-8b", "data.sequence_length=4096", "batch.micro=1", f"batch.global={micros}",
             f"mesh.pp={pp}", f"parallel.schedule={schedule}", f"parallel.chunks={chunks}",
             "precision.compute=bfloat16")  # fmt: skip
    price = ask(*words, "mesh.dp=1", "cluster.software.following=literal")
    closed = float(price.estimates.times.step[0])
    assert closed == pytest.approx(simulated(price.plan, price.cluster).step_seconds, rel=0.035)
