"""Memory folded over few micro-batches is that of the whole step, to the byte, and on few stages that of all."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshwright.config.errors import RequestError
from meshwright.layout.axes import Axis, Coordinates
from meshwright.plan.folds.memory import memory
from meshwright.price.folded import folded, may_be_fullest, steady, transport_of
from meshwright.price.price import Price
from tests.unit.price.ask import ask

MODEL = ("model.hidden=64", "model.heads=4", "model.kv_heads=4", "model.ffn=128", "data.sequence_length=128",
         "model.max_positions=128", "cluster.software.following=literal")  # fmt: skip
SCHEDULES = {"1f1b": 1, "interleaved": 3, "zb-h1": 1, "zb-v": 2, "gpipe": 1, "naive": 1}


def drawn(random_: random.Random, schedule: str) -> Price:
    """A small run of many micro-batches."""
    one = random_.choice
    chunks, pp, dp, micro = (
        SCHEDULES[schedule],
        one([1, 2, 3, 4]) if schedule == "1f1b" else one([2, 3, 4]),
        one([1, 2]),
        1,
    )
    layers, count = pp * chunks + one([0, 1, 3]), one([5, 12, 17, 22, 31])
    words = [
        f"model.layers={layers}", f"model.vocab={one([257, 8192])}", f"model.family={one(['llama', 'gpt2'])}",
        f"mesh.pp={pp}", f"mesh.dp={dp}", f"mesh.tp={one([1, 2])}", f"batch.micro={micro}",
        f"batch.global={count * dp * micro}", f"parallel.schedule={schedule}", f"parallel.chunks={chunks}",
        f"parallel.zero={one([0, 1, 2, 3])}", f"parallel.reshard_after_forward={one(['true', 'false'])}",
        f"parallel.recompute={one(['none', 'selective', 'full'])}", f"model.tie_embeddings={one(['true', 'false'])}",
        f"parallel.offload={one(['none', 'optimizer'])}", f"precision.compute={one(['bfloat16', 'float32'])}",
    ]  # fmt: skip
    try:
        return ask(*MODEL, *words, cluster=one(["h100-sxm", "local"]))
    except RequestError:  # keys that do not go together
        return drawn(random_, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_few_micro_batches_and_few_stages_tell_all(schedule: str) -> None:
    random_ = random.Random(schedule)
    for _ in range(8):
        price = drawn(random_, schedule)
        plan, fused = price.plan, price.cluster.device.generation != "cpu"
        whole = [
            memory(
                plan, plan.degrees.rank(Coordinates(pp=stage)), transport=transport_of(price.cluster), fused_norms=fused
            )
            for stage in range(plan.degrees.pp)
        ]
        assert folded(plan, price.cluster, range(plan.degrees.pp)) == tuple((t.peak_bytes, t.largest) for t in whole)
        peak = max(timeline.peak_bytes for timeline in whole)
        assert max(whole[stage].peak_bytes for stage in may_be_fullest(plan)) == peak
        assert price.trained_peak == price.memory["peak"] == peak


def test_where_all_forwards_come_first_every_micro_batch_counts() -> None:
    """The peak of `train` under gpipe was that of three micro-batches a stage, however many there were."""
    words = (*MODEL[:-1], "model.layers=4", "mesh.dp=1", "mesh.pp=2", "parallel.schedule=gpipe", "batch.micro=1")
    few, many = (ask(*words, f"batch.global={count}").trained_peak for count in (6, 24))
    assert few is not None
    assert many is not None
    assert many > 3 * few / 2


def test_the_order_of_the_mesh_changes_no_size() -> None:
    price = ask(*MODEL, "model.layers=4", "mesh.dp=2", "mesh.pp=2", "mesh.tp=2", "parallel.zero=1", "batch.global=64")
    other = replace(price.plan.degrees, order=(Axis.DP, Axis.PP, Axis.EP, Axis.CP, Axis.TP))
    assert other != price.plan.degrees
    assert Price(replace(price.plan, degrees=other), price.cluster).stage_peaks == price.stage_peaks


def test_few_micro_batches_leave_what_rounds_leave() -> None:
    plan = ask(*MODEL, "model.layers=6", "mesh.dp=1", "mesh.pp=3", "batch.micro=1", "batch.global=32").plan
    assert steady(plan).accumulation == 11
    assert steady(steady(plan)) == steady(plan)
