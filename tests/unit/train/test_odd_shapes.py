"""Peaks of legal runs that no published model has: heads wide beside the stream, a stream wide beside all else, experts
of a few columns. A correct run must not be told that its memory is another than predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.arch.resolve import arch_from_model
from meshwright.comm.mesh import Mesh
from meshwright.config.load import build_run
from meshwright.parallel.engine import Engine
from meshwright.plan.folds.memory import memory
from meshwright.plan.resolve import resolve
from meshwright.testing.models import m0_bytes
from meshwright.train.account import PEAK_TOLERANCE
from meshwright.train.peak import PeakWatch
from meshwright.verify.batches import global_batches

SMALL = {"vocab": 17, "layers": 1}
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "wide heads": {
        "model": {"family": "qwen3", "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 8, "layers": 1},
        "data": {"sequence_length": 100},
    },
    "wide heads, recomputed between products": {
        "model": SMALL | {"hidden": 24, "heads": 8, "kv_heads": 1, "head_dim": 16, "ffn": 16, "dropout": 0.1},
        "data": {"sequence_length": 257},
        "precision": {"compute": "float64"},
        "parallel": {"recompute": "selective"},
    },
    "wide heads, turned in float32": {
        "model": SMALL | {"hidden": 64, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 32, "layers": 2},
        "data": {"sequence_length": 64},
        "batch": {"global": 4, "micro": 4},
        "precision": {"compute": "bfloat16"},
        "parallel": {"recompute": "selective"},
    },
    "masks of long sequences": {
        "model": {"family": "qwen3", "hidden": 24, "heads": 1, "kv_heads": 1, "head_dim": 6, "ffn": 32, "layers": 2},
        "data": {"sequence_length": 384, "documents": "masked"},
        "parallel": {"recompute": "full"},
    },
    "a wide stream, dropout": {
        "model": {"hidden": 64, "heads": 2, "kv_heads": 2, "head_dim": 4, "ffn": 8, "layers": 6, "dropout": 0.1},
        "data": {"sequence_length": 128},
        "precision": {"compute": "float64"},
        "parallel": {"recompute": "full"},
    },
    "narrow experts": {
        "model": SMALL | {"family": "mixtral", "hidden": 64, "heads": 1, "kv_heads": 1, "head_dim": 2, "ffn": 8,
                          "experts": 4, "experts_per_token": 2, "dropout": 0.1},
        "data": {"sequence_length": 256},
        "parallel": {"recompute": "full"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_predicted_peaks_are_near(name: str) -> None:
    tables = {"batch": {"global": 2, "micro": 2}, **SHAPES[name]}
    run = build_run(m0_bytes(mesh={"dp": 1}, **tables))
    plan = resolve(run, arch_from_model(run.model))
    engine = Engine(plan, Mesh.of(plan).start())
    with PeakWatch(engine.allocator) as watch:
        engine.step(global_batches(plan, 1)[0], 1e-3)
    predicted = memory(plan, 0, kernel_threads=torch.get_num_threads()).peak_bytes
    assert predicted == pytest.approx(watch.num_bytes, rel=PEAK_TOLERANCE)
