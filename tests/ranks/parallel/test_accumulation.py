"""Micro-batch gradients made 1, 2, 4 and 8 by hand sum to 15 in every element that is anybody's, on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.config.choices import Schedule
from meshwright.parallel.engine import Engine
from meshwright.parallel.store import Store
from meshwright.plan.action import Action, Op
from meshwright.plan.plan import Execution
from meshwright.testing.ranks import run_cases
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.pipelines import Pipelined, pipeline_of
from tests.ranks.parallel.plain import ODD, Case, full_recompute
from tests.ranks.parallel.running import engine_of

MICROS = 4


class Hand:
    """Writes 2^m into every gradient of micro-batch m, by the ways that real ones take."""

    def __init__(self, engine: Engine) -> None:
        self.micro, self.reduced = 0, dict[int, torch.Tensor]()
        self._engine = engine
        engine.observe(self.before)
        for store in engine.stores:
            store.add_product = self._product(store)  # type: ignore[method-assign]
            store.add_rows = self._product(store)  # type: ignore[method-assign]
            store.collect = self._collect(store)  # type: ignore[method-assign]

    def before(self, action: Action) -> None:
        if action.op in (Op.BACKWARD, Op.WEIGHT):
            self.micro = action.micro
        if action.op is Op.UPDATE:
            self.reduced[action.bucket] = self._engine.stores[action.bucket].reduced.clone()

    def _product(self, store: Store) -> Any:
        plain = store.add_product

        def add(name: str, *_: torch.Tensor) -> None:
            rows, columns = store.parameters[name].shape
            ones = torch.ones(1, rows, dtype=torch.float64), torch.ones(1, columns, dtype=torch.float64)
            plain(name, 2.0**self.micro * ones[0], ones[1])

        return add

    def _collect(self, store: Store) -> Any:
        plain = store.collect

        def collect(names: Any) -> None:
            for name in names:
                if store.parameters[name].grad is not None:
                    store.parameters[name].grad.fill_(2.0**self.micro)
            plain(names)

        return collect


def sums_to_15(rank: int, case: Case) -> None:
    check_sums(engine_of(case.plan), case.dp)


def stages_sum_to_15(rank: int, case: Pipelined) -> None:
    check_sums(pipeline_of(case.plan), 1)


def check_sums(engine: Engine, copies: int) -> None:
    plan, rank, hand = engine.plan, engine.mesh.rank, Hand(engine)
    for batch in global_batches(plan, 2):  # the second step finds nothing of the first
        engine.step(local_share(plan, batch, rank), 0.0)
        assert sorted(hand.reduced) == [store.bucket.index for store in engine.stores]
        for store in engine.stores:
            wanted = torch.zeros(store.bucket.numel, dtype=torch.float64)
            for segment in store.bucket.segments:
                wanted[segment.offset : segment.stop] = 15.0 * copies
            assert torch.equal(hand.reduced[store.bucket.index], wanted[store.first : store.last])
        hand.reduced.clear()


def cases(dp: int, within: int = 0) -> list[Case]:
    return [
        Case(f"stage {zero}, groups of {within}, {execution.recompute}", dp, zero, MICROS, within, execution=execution,
             arch=tuple(ODD.items()))
        for zero in range(1 if within else 0, 4)
        for execution in (Execution(), full_recompute())
    ]  # fmt: skip


@pytest.mark.prove
def test_every_schedule() -> None:
    """B10 (pytorch/torchtitan#1732): scaled again with every micro-batch, sums became moving averages."""
    chunks = {Schedule.INTERLEAVED: 2, Schedule.ZB_V: 2}
    run_cases(stages_sum_to_15, 2, [Pipelined(each, 2, MICROS, chunks.get(each, 1)) for each in Schedule], timeout=90)


def test_every_stage() -> None:
    run_cases(sums_to_15, 3, cases(3), timeout=90)


def test_hybrid_groups() -> None:
    run_cases(sums_to_15, 4, cases(4, 2), timeout=90)
