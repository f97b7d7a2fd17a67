"""Tiny jobs on a corpus written for the test: M0 in float64, and what their run folders hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.arch.resolve import arch_from_model
from meshwright.config.load import build_run
from meshwright.plan.resolve import resolve
from meshwright.testing.models import m0_bytes
from meshwright.train.job import Job, job_of

TEXT = "\n".join(f"def f{i}(x): return x * {i} if x else None  # {'ab' * (i % 7)}" for i in range(120))


def tiny_job(folder: Path, world: int, name: str = "", **sections: dict[str, Any]) -> Job:
    """A job of 6 steps of 8 sequences, evaluated every 3 steps; `sections` replace single keys."""
    source = folder / "corpus.txt"
    if not source.exists():
        source.write_text(TEXT)
    base: dict[str, dict[str, Any]] = {
        "data": {"source": str(source), "eval_fraction": 0.05},
        "mesh": {"dp": world},
        "batch": {"global": 8, "micro": 1},
        "optimizer": {"warmup_steps": 2},
        "precision": {"compute": "float64"},
        "train": {"steps": 6, "eval_every": 3, "output": str(folder), "device": "cpu"},
    }
    keys = {section: {**base.get(section, {}), **sections.get(section, {})} for section in base.keys() | sections}
    tables = m0_bytes(**keys)
    tables["name"] = name or f"dp{world}"
    run = build_run(tables)
    return replace(job_of(run, resolve(run, arch_from_model(run.model))), sample_tokens=10)


def lines(job: Job, file: str) -> list[dict[str, Any]]:
    """The lines of a .jsonl file of a run folder."""
    return [json.loads(line) for line in (job.folder / file).read_text().splitlines()]


def steps(job: Job) -> list[dict[str, Any]]:
    """The step lines of metrics.jsonl."""
    return [line for line in lines(job, "metrics.jsonl") if "loss" in line]


def evaluations(job: Job) -> list[dict[str, Any]]:
    """The evaluation lines of metrics.jsonl."""
    return [line for line in lines(job, "metrics.jsonl") if "eval_loss" in line]
