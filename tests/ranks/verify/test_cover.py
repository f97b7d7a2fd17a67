"""A pairwise cover of layouts and features against one float64 process: every two of them meet in some run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.arch.resolve import arch_from_model
from meshwright.config.errors import RequestError
from meshwright.config.load import build_run
from meshwright.parallel.support import check_supported
from meshwright.plan.plan import Plan
from meshwright.plan.resolve import resolve
from meshwright.testing.models import m0_bytes
from meshwright.testing.pairwise import Row, pairs_of, pairwise
from meshwright.verify.ladder import Rung
from meshwright.verify.settings import DOUBLE, OPTIMIZERS, optimizer_of
from meshwright.verify.verify import judge
from tests.ranks.verify.parity import FEW, Job, climb, job

RANKS, SEQUENCES = 4, 8
AXES: dict[str, list[Any]] = {
    "family": ["llama", "gpt2", "qwen3"],
    "tied": [False, True],
    "dropout": [0.0, 0.25],
    "precision": ["float64", "float32"],
    "recompute": ["none", "full", "selective"],
    "accumulation": [4, 1],
    "zero": [0, 1, 2, 3],
    "pipe": ["none", "1f1b", "interleaved", "zb-h1", "zb-v"],
    "tp": [1, 2],
    "context": ["none", "ring", "allgather", "ulysses"],
    "documents": ["packed", "masked"],
    "ring": [False, True],
    "dp": [2, 1],
}
"""A feature that is built gets a line here."""


def plan_of(row: Row) -> Plan:
    """Raises RequestError or NotImplementedError where the combination does not run."""
    piped = row["pipe"] != "none"
    model = {"layers": 4, "family": row["family"], "tie_embeddings": row["tied"], "dropout": row["dropout"]}
    run = build_run(
        m0_bytes(
            model=model if row["family"] != "gpt2" else {**model, "kv_heads": 4, "max_positions": 16},
            data={"sequence_length": 8, "documents": row["documents"]},
            mesh={"dp": row["dp"], "tp": row["tp"], "pp": 1 + piped, "cp": 1 if row["context"] == "none" else 2},
            parallel={
                "zero": row["zero"],
                "schedule": row["pipe"] if piped else "1f1b",
                "chunks": 2 if row["pipe"] in ("interleaved", "zb-v") else 1,
                "recompute": row["recompute"],
                "context": "ring" if row["context"] == "none" else row["context"],
                "asynchronous_tensor": row["ring"],
            },
            batch={"global": SEQUENCES, "micro": SEQUENCES // (row["dp"] * row["accumulation"])},
            precision={"compute": row["precision"]},
        )
    )
    plan = resolve(run, arch_from_model(run.model))
    check_supported(plan)
    return replace(plan, optimizer=optimizer_of(OPTIMIZERS[0]))


def legal(row: Row) -> bool:
    if row["ring"] and row["tp"] == 1:
        return False
    try:
        return plan_of(row).degrees.ranks <= RANKS
    except (RequestError, NotImplementedError):
        return False


ALONE = {"context": "none", "documents": "packed"}
"""Kinds of context meet everything else in `parallel/test_context.py`: here only where time does not count."""


def cover(whole: bool = True) -> list[Row]:
    axes = AXES if whole else {name: values for name, values in AXES.items() if name not in ALONE}
    rows = [ALONE | row for row in pairwise(axes, lambda row: legal(ALONE | row))]
    return [{name: row[name] for name in AXES} for row in rows]


def test_features_meet_in_pairs() -> None:
    rows = cover()
    assert len(rows) <= 40
    met = {pair for row in rows for pair in pairs_of(row)}
    for name, values in AXES.items():
        for value in values:
            assert any(row[name] == value for row in rows), f"{name} = {value} runs nowhere"
    for pair in (
        (("zero", 3), ("pipe", "zb-v")), (("zero", 2), ("tp", 2)), (("tied", True), ("pipe", "1f1b")),
        (("dropout", 0.25), ("recompute", "full")), (("family", "gpt2"), ("tp", 2)),
        (("pipe", "zb-h1"), ("context", "ring")), (("tp", 2), ("context", "ulysses")),
        (("zero", 3), ("context", "ring")),
        (("context", "allgather"), ("documents", "masked")), (("recompute", "selective"), ("context", "ring")),
    ):  # fmt: skip
        assert pair in met


@pytest.mark.timeout(340)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.prove)])
def test_every_two_features_together_equal_one_process(tmp_path: Path, whole: bool) -> None:
    rungs: dict[str, list[Rung]] = defaultdict(list)
    for row in cover(whole):
        plan = plan_of(row)
        told = ", ".join(f"{name} {value}" for name, value in row.items())
        rungs[replace(plan, precision=DOUBLE).math].append(Rung((told,), plan))
    jobs = [job(name, tmp_path, each, steps=FEW) for name, each in rungs.items()]
    reports = climb(jobs, RANKS, timeout=330)
    assert not (wrong := list(_differing(jobs, reports))), "\n".join(wrong)


def _differing(jobs: list[Job], reports: Any) -> Any:
    for each, of_job in zip(jobs, reports, strict=True):
        for rung, of_rung in zip(each.rungs, of_job, strict=True):
            outcome = judge(rung, each.references, of_rung)
            if not outcome.ok:
                yield f"{rung.name}: {outcome.first}"
