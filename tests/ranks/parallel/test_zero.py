"""ZeRO equals one process: every stage, any number of replicas, accumulation, tying, hybrid groups, odd sizes."""

from __future__ import annotations

import math
import random
import sys
import time
from copy import copy

import numpy as np
import pytest
import torch

from meshwright.config.choices import Dtype
from meshwright.data.batch import IGNORED, Batch
from meshwright.layout.groups import GroupName
from meshwright.parallel.engine import Engine
from meshwright.plan.action import Action
from meshwright.plan.folds.ledger import ledger
from meshwright.plan.folds.traffic import Operation
from meshwright.plan.plan import Optimizer, Precision
from meshwright.testing.ranks import run_cases
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.plain import ADAMW, ODD, SGD, Case, plain_training
from tests.ranks.parallel.running import check_parity, engine_of, train, weights

ODD_ARCH = tuple(ODD.items())
MASTERS = Precision(Dtype.FLOAT32, Dtype.FLOAT32, Dtype.FLOAT64)


def matrix(dp: int) -> list[Case]:
    """All of it on two replicas; on more, the ends of every axis."""
    full = [(acc, tied, rule) for acc in (1, 4) for tied in (False, True) for rule in (SGD, ADAMW)]
    mixes = full if dp == 2 else [(1, False, ADAMW), (4, True, SGD)]
    cases = [
        Case(f"dp {dp}, stage {zero}, {acc} micro-batches, {'tied' if tied else 'untied'}, {rule.kind.value}",
             dp, zero, acc, tied=tied, optimizer=rule)
        for zero in range(4)
        for acc, tied, rule in mixes
    ]  # fmt: skip
    cases += [Case(f"dp {dp}, stage {zero}, odd sizes", dp, zero, 4, arch=ODD_ARCH) for zero in range(4)]
    if dp == 2:
        cases.append(Case("stage 3 kept until backward", dp, 3, 4, reshard=False, tied=True))
        cases += [Case(f"stage {zero}, small buckets", dp, zero, bucket_bytes=20_000) for zero in range(4)]
    return cases


def hybrid() -> list[Case]:
    return [
        Case(f"stage {zero}, 2 x 2, {accumulation} micro-batches", 4, zero, accumulation, within=2, tied=True)
        for zero in (1, 2, 3)
        for accumulation in (1, 4)
    ]


def equals_one_process(rank: int, case: Case) -> None:
    plan = case.plan
    engine = engine_of(plan)
    ran = train(engine)
    check_parity(ran, plain_training(plan))
    predicted = set(ledger(plan, rank))
    assert all(set(rows) == predicted for rows in ran.rows), (ran.rows[0], predicted)
    if plan.sharding.within:
        copies = [row for row in ran.rows[0] if row.group is GroupName.COPY]
        assert [row.operation for row in copies] == [Operation.ALL_REDUCE]


@pytest.mark.parametrize("dp", [2, pytest.param(3, marks=pytest.mark.prove), 4])
def test_every_stage_equals_one_process(dp: int) -> None:
    run_cases(equals_one_process, dp, matrix(dp), timeout=110)


def test_hybrid_groups_equal_one_process() -> None:
    run_cases(equals_one_process, 4, hybrid(), timeout=110)


class Trace:
    """Counts units at every action of a step, and bytes of unreduced gradients at every event in between."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.unreduced: list[set[int]] = []
        self.gathered: list[set[int]] = []
        engine.observe(self.look)
        engine.allocator.on_event = lambda event: self.look(None)

    def look(self, _: Action | None) -> None:
        live = [store for store in self.engine.stores if not store.bucket.tied]
        self.unreduced.append({s.bucket.units[0] for s in live if s.gradient.untyped_storage().nbytes()})
        self.gathered.append({s.bucket.units[0] for s in live if s.whole.untyped_storage().nbytes()})


def keeps_few_units(rank: int, case: Case) -> tuple[int, int, int]:
    plan = case.plan
    engine = engine_of(plan)
    states = engine.allocator.total
    trace = Trace(engine)
    ran = train(engine, steps=2)
    assert math.isfinite(ran.results[-1].loss)
    assert engine.allocator.total == states, "a step left memory behind"
    return max(map(len, trace.unreduced)), max(map(len, trace.gathered)), engine.allocator.peak


def test_at_every_instant_stage_2_keeps_two_gradients_and_stage_3_three_units() -> None:
    layers = ("layers", 6)
    cases = [
        Case(f"stage {zero}, {accumulation}, {tied}", 2, zero, accumulation, tied=tied, arch=(layers,))
        for tied in (False, True)
        for accumulation in (1, 4)
        for zero in range(4)
    ]
    for results in run_cases(keeps_few_units, 2, cases):
        for case, (unreduced, gathered, _) in zip(cases, results, strict=True):
            units = 8 if not case.tied else 7  # a tied embedding is no unit's bucket; the head keeps its norm's
            if case.zero < 2:
                assert unreduced == units, case.name
            else:
                assert unreduced <= 2, case.name
            if case.zero < 3:
                assert gathered == units, case.name
            else:
                assert gathered <= 3, case.name
        peaks = {(c.tied, c.accumulation, c.zero): peak for c, (_, _, peak) in zip(cases, results, strict=True)}
        for tied in (False, True):
            for accumulation in (1, 4):
                stage = [peaks[tied, accumulation, zero] for zero in range(4)]
                assert stage[3] < stage[2] < stage[1] < stage[0], stage


def survives_wild_padding(rank: int, case: Case) -> None:
    plan = case.plan
    engine = engine_of(plan)
    for store in engine.stores:
        used = torch.zeros(store.bucket.numel, dtype=torch.bool)
        for segment in store.bucket.segments:
            used[segment.offset : segment.stop] = True
        assert not bool(used.all()), "there is no padding to fill"
        for flat, span in ((store.whole, slice(None)), (store.shard, slice(store.first, store.last))):
            if flat is not None and flat.untyped_storage().nbytes():
                flat[~used[span]] = torch.nan
    ran = train(engine)
    check_parity(ran, plain_training(plan))


def test_padding_never_enters_anything() -> None:
    cases = [Case(f"stage {zero}", 3, zero, 4, arch=ODD_ARCH) for zero in range(4)]
    run_cases(survives_wild_padding, 3, cases)


def decays_by_shape(rank: int, case: Case) -> None:
    """A batch in which nothing counts: gradients are zero, and only decay moves anything."""
    plan = case.plan
    engine = engine_of(plan)
    start = weights(engine)
    share = local_share(plan, global_batches(plan, 1)[0], rank)
    nothing = Batch(share.inputs, np.full_like(share.labels, IGNORED), share.rows)
    result = engine.step(nothing, 0.1)
    assert (result.loss, result.grad_norm, result.trained_tokens) == (0.0, 0.0, 0)
    for name, after in weights(engine).items():
        wanted = start[name] * (0.99 if after.dim() >= 2 else 1.0)
        torch.testing.assert_close(after, wanted, rtol=1e-15, atol=0)


def test_matrices_decay_and_gains_do_not() -> None:
    """Whatever the layout: learning rate 0.1, decay 0.1, no gradient."""
    rule = Optimizer(weight_decay=0.1)
    biased = (("qkv_bias", True), ("output_bias", True), ("mlp_bias", True))
    cases = [Case(f"stage {zero}", 2, zero, optimizer=rule, arch=biased) for zero in range(4)]
    run_cases(decays_by_shape, 2, cases)


def reads_or_receives(rank: int, case: Case) -> None:
    """Shards that are read where they lie, however far ranks are apart in a step, beside shards that are sent."""
    plan = case.plan
    reading, late = engine_of(plan), random.Random(rank)
    receiving_mesh = copy(reading.mesh)
    receiving_mesh.shares_memory = False
    receiving = Engine(plan, receiving_mesh)
    assert all(len(store.shards) == store.group.size for store in reading.stores)
    assert not any(store.shards for store in receiving.stores)
    assert reading.allocator.total == receiving.allocator.total
    received = train(receiving)
    reading.mesh.ledger.clear()
    for number, batch in enumerate(global_batches(plan, 3)):
        reading.observe(lambda _: time.sleep(late.choice((0.0, 0.0, 0.0, 0.002))))
        result = reading.step(local_share(plan, batch, rank), plan.optimizer.learning_rate)
        assert result == received.results[number]
        if number == 0:
            assert reading.mesh.ledger.rows == received.rows[0]
        evaluated = [engine.evaluate(local_share(plan, batch, rank)) for engine in (reading, receiving)]
        assert number < 2 or evaluated[0] == evaluated[1]
    for one, other in zip(weights(reading).values(), weights(receiving).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.skipif(sys.platform != "linux", reason="memory that ranks share is Linux's")
def test_shards_that_are_read_where_they_lie_equal_shards_that_are_sent() -> None:
    cases = [
        Case("whole groups, micro-batches", 4, 3, accumulation=4),
        Case("groups of two, tied", 4, 3, within=2, tied=True),
        Case("kept until backward, a master copy", 4, 3, 2, reshard=False, precision=MASTERS),
    ]
    run_cases(reads_or_receives, 4, cases)
