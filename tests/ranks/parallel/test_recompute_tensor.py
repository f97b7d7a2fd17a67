"""Selective recomputation on a tensor axis: one process's numbers, nothing sent that the ledger does not say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from meshwright.config.choices import Recompute
from meshwright.layout.groups import GroupName
from meshwright.parallel.engine import Engine
from meshwright.plan.folds.ledger import Row, ledger
from meshwright.testing.ranks import run_cases
from tests.ranks.parallel.logical import check_one_process, shared_mesh, train
from tests.ranks.parallel.test_tensor import Case

SELECTIVE = Recompute.SELECTIVE


def equals_one_process(rank: int, case: Case) -> None:
    plan = case.plan
    ran = train(Engine(plan, shared_mesh(plan)))
    check_one_process(ran, plan)
    assert all(set(rows) == set(ledger(plan, rank)) for rows in ran.rows)
    kept = replace(plan, execution=replace(plan.execution, recompute=Recompute.NONE))
    assert sent(ledger(plan, rank)) == sent(ledger(kept, rank)), "made again by sending again"


def sent(rows: Iterable[Row]) -> Counter[str]:
    """Bytes on the tensor axis by operation."""
    out: Counter[str] = Counter()
    for row in rows:
        if row.group is GroupName.TP:
            out[f"{row.operation} {row.phase}"] += row.payload_bytes
    return out


TWO = [
    Case(recompute=SELECTIVE, dropout=0.1, tied=True),
    Case(recompute=SELECTIVE, dropout=0.1, sequence=True, accumulation=2),
    Case("qwen3", recompute=SELECTIVE, kv_heads=1),
    Case("qwen3", recompute=SELECTIVE, kv_heads=1, sequence=True),
    Case("mistral", recompute=SELECTIVE, sequence=True),
    Case("gpt2", recompute=SELECTIVE, dropout=0.1),
    Case("gpt2", recompute=SELECTIVE, dropout=0.1, sequence=True),
]
FOUR = [
    *(
        Case(family, dp=2, zero=zero, sequence=zero % 2 == 1, recompute=SELECTIVE, kv_heads=2, accumulation=2)
        for zero, family in enumerate(("llama", "qwen2", "gpt2", "qwen3"))
    ),
    Case(pp=2, sequence=True, accumulation=4, recompute=SELECTIVE, dropout=0.1),
    Case(tp=4, kv_heads=2, recompute=SELECTIVE, sequence=True),
]


def test_two_ranks_equal_one_process() -> None:
    run_cases(equals_one_process, 2, TWO, timeout=110)


@pytest.mark.prove
def test_four_ranks_equal_one_process() -> None:
    run_cases(equals_one_process, 4, FOUR, timeout=110)
