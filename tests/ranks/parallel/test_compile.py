"""Compiled units: whole graphs, shared by blocks, the same numbers under ZeRO and recomputation."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
from torch._dynamo.utils import counters

import meshwright.parallel.engine as engines
from meshwright.config.choices import Recompute
from meshwright.parallel.compile import compile_units
from meshwright.plan.folds.ledger import ledger
from meshwright.plan.plan import Execution
from meshwright.testing.ranks import run_cases
from tests.ranks.parallel.plain import Case, plain_training
from tests.ranks.parallel.running import check_parity, engine_of, train


def compiled(recompute: Recompute = Recompute.NONE) -> Execution:
    return Execution(recompute=recompute, compile=True)


def equals_one_process(rank: int, case: Case, backend: str) -> tuple[int, int]:
    counters.clear()
    engines.compile_units = partial(compile_units, backend=backend)
    plan = case.plan
    ran = train(engine_of(plan), steps=2)
    check_parity(ran, plain_training(plan, 2))
    assert all(set(rows) == set(ledger(plan, rank)) for rows in ran.rows)
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def cases() -> list[Case]:
    small = (("layers", 3), ("dropout", 0.1))
    return [
        Case("stage 2, tied", 2, 2, 2, tied=True, execution=compiled(), arch=small),
        Case("stage 3, run again", 2, 3, 2, execution=compiled(Recompute.FULL), arch=small),
    ]


def check(found: list[list[tuple[int, int]]]) -> None:
    for plain, again in found:
        assert plain == (3, 0), "embedding, one graph for all blocks, loss"
        assert again == (4, 0), "and a forward that keeps nothing"


def test_compiled_units_equal_one_process() -> None:
    check(run_cases(equals_one_process, 2, cases(), "aot_eager", timeout=110))


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU needs a C++ compiler")
def test_compiled_to_machine_code_too() -> None:
    check(run_cases(equals_one_process, 2, cases(), "inductor", timeout=580))
