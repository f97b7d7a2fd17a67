"""A first step that is skipped, as in float16 while the loss scale is too large, updates nothing: it is no account."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.launch.status import RankStatus
from meshwright.optim import scale
from meshwright.train.loop import train_joined
from tests.ranks.train.jobs import steps, tiny_job


def test_the_first_step_that_is_taken_is_held_against_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters visit in an update alone, so that a step without one holds half of what was predicted."""
    monkeypatch.setattr(scale, "START", 2.0**24)
    job = tiny_job(
        tmp_path, 1, precision={"compute": "float16"}, parallel={"offload": "optimizer"},
        model={"hidden": 32, "head_dim": 8, "ffn": 512}, data={"sequence_length": 4}, batch={"global": 1, "micro": 1},
        train={"steps": 12, "eval_every": 0}, checkpoint={"every": 0},
    )  # fmt: skip
    train_joined(RankStatus(), replace(job, strict=True))
    overflowed = sum(line["grad_norm"] is None or line["grad_norm"] != line["grad_norm"] for line in steps(job))
    ledger = json.loads((job.folder / "ledger.json").read_text())
    assert 0 < overflowed < 12
    assert ledger["peak_near"]
