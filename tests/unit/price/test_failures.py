"""Young, Daly and goodput against a simulation; what lost ranks take, against ownership counted by hand."""

import random
from math import prod

import pytest

import meshwright as mw
from meshwright.checkpoint.state import owned_state, shapes
from meshwright.config.load import load_run
from meshwright.price.catalogue import cluster_of
from meshwright.price.failures import (
    checkpoint_bytes,
    daly,
    goodput,
    goodput_told,
    lost,
    lost_told,
    written_bytes,
    young,
)
from tests.unit.price.ask import ask


def test_young_and_daly_agree_where_checkpoints_are_cheap() -> None:
    assert young(1.0, 1e6) == pytest.approx(daly(1.0, 1e6), rel=2e-3)
    assert daly(5000.0, 1000.0) == 1000.0  # more than 2 M: one save a failure


def test_dalys_interval_is_the_best_one() -> None:
    blocked, restart, mtbf = 30.0, 300.0, 3600.0
    best = goodput(daly(blocked, mtbf), blocked, restart, mtbf)
    assert all(
        goodput(daly(blocked, mtbf) * factor, blocked, restart, mtbf) <= best + 1e-4 for factor in (0.5, 0.8, 1.25, 2)
    )


def test_goodput_is_what_a_simulated_run_keeps() -> None:
    """Failures in work, checkpoint and restart alike, exponentially spaced."""
    drawn, interval, blocked, restart, mtbf = random.Random(0), 400.0, 20.0, 60.0, 2000.0
    clock, saved, left = 0.0, 0, drawn.expovariate(1 / mtbf)
    while saved < 20_000:
        need = interval + blocked
        while left < need:
            clock += left
            left, need = drawn.expovariate(1 / mtbf), restart + interval + blocked
        clock, left, saved = clock + need, left - need, saved + 1
    assert goodput(interval, blocked, restart, mtbf) == pytest.approx(saved * interval / clock, rel=0.02)


@pytest.mark.parametrize(("zero", "within", "gone"), [(0, 0, False), (1, 0, True), (3, 0, True), (3, 2, False)])
def test_what_is_sharded_goes_unless_copies_exist(zero: int, within: int, gone: bool) -> None:
    plan = mw.plan(load_run(None, ["mesh.dp=4", f"parallel.zero={zero}", f"parallel.zero_shard_within={within}"]))
    losses = lost(plan, [1])
    state = next(each for each in losses if each.what.startswith("optimizer"))
    assert (not state.holders) is gone
    weights = next(each for each in losses if each.what == "parameters")
    assert bool(weights.holders) is (zero < 3 or within > 0)
    if within:
        assert state.holders == (3,)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["mesh.dp=2", "parallel.zero=1"], ["still on rank 1", "1 piece gone"]),
        (["mesh.dp=4"], ["still on 3 ranks, the first of them 1", "nothing is gone"]),
        (["mesh.dp=1"], ["GONE", "2 pieces gone"]),
    ],
)
def test_what_is_lost_is_told_in_its_number(words: list[str], told: list[str]) -> None:
    """It was "1 pieces are gone", and "still on 1 ranks, the first 1"."""
    lines = "\n".join(lost_told(mw.plan(load_run(None, words)), [0])[1])
    assert all(each in lines for each in told)


def test_one_device_fails_alone() -> None:
    assert "on 1 device;" in "\n".join(goodput_told(ask("mesh.dp=1"), 50_000, 300.0)[1])


def test_pipeline_neighbours_hold_nothing_of_each_other() -> None:
    losses = lost(mw.plan(load_run(None, ["mesh.dp=1", "mesh.pp=2"])), [0])
    assert all(not each.holders for each in losses)


def test_experts_are_sharded_over_all_their_replicas() -> None:
    """`zero_shard_within` makes copies of what all replicas share alone; experts' shards were told to have some."""
    words = (
        "model.preset=mixtral-8x7b",
        "mesh.dp=4",
        "mesh.ep=2",
        "batch.global=16",
        "batch.micro=1",
        "parallel.zero=1",
    )
    losses = lost(ask(*words, "parallel.zero_shard_within=2").plan, [0])
    state = {each.what: each for each in losses if "optimizer" in each.what}
    assert len(state["optimizer state and master copies"].holders) == 3
    experts = state["experts' optimizer state and master copies"]
    assert experts.holders == ()
    assert experts.coordinates.endswith("shard 0 of 4")


def test_goodput_is_told_to_the_percent_of_a_percent_and_short_times_in_their_unit() -> None:
    price = ask("model.preset=llama3-8b", "mesh.tp=8", "batch.global=8", "batch.micro=1", "precision.compute=bfloat16")
    told = "\n".join(goodput_told(price, 50_000, 300.0)[1])
    assert "one every 3,125.00 h on 16 devices" in told
    assert "99.9" in told
    assert "100.0" not in told
    assert "one every 0.23 ms" in "\n".join(goodput_told(price, 1e-6, 300.0)[1])


def test_dalys_interval_is_told_as_it_is_where_a_step_takes_longer() -> None:
    """The step's seconds were told as Daly's."""
    price = ask("model.preset=llama3-8b", "mesh.tp=8", "batch.global=8", "batch.micro=1", "precision.compute=bfloat16")
    found, _ = goodput_told(price, 1e-4, 300.0, 0.001)
    assert found["daly_s"] == daly(0.001, found["mtbf_s"])
    assert found["daly_s"] < price.step_seconds == found["interval_s"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("adamw", "precision.compute=bfloat16"),
        ("sgd", "optimizer.weight_decay=0"),
        ("adamw", "precision.compute=float64"),
    ],
)
def test_a_checkpoint_is_as_large_as_the_trainer_writes_it(kind: str, words: str) -> None:
    """Parameters were counted twice beside a master copy: the file has one weight, of the master's type."""
    plan = mw.plan(load_run(None, ["mesh.dp=2", f"optimizer.kind={kind}", words]))
    assert checkpoint_bytes(plan) == sum(prod(shape) * dtype.itemsize for shape, dtype in shapes(plan).values())


@pytest.mark.parametrize(
    "words",
    [
        ["mesh.dp=4"],
        ["mesh.dp=4", "parallel.zero=1"],
        ["mesh.dp=4", "parallel.zero=3", "parallel.zero_shard_within=2"],
        ["mesh.dp=2", "mesh.tp=2", "mesh.pp=2", "parallel.zero=2"],
    ],
)
def test_a_checkpoint_blocks_while_the_rank_that_writes_most_copies(words: list[str]) -> None:
    """It was the checkpoint over all ranks, also where one replica writes all of it."""
    plan = mw.plan(load_run(None, words))
    most = max(sum(piece.rectangle.numel for piece in pieces) for pieces in owned_state(plan).values())
    assert written_bytes(mw.price(plan, cluster_of("h100-sxm"))) == pytest.approx(12 * most, rel=0.02)
