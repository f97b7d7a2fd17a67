"""The account of a run: one expectation of memory, whatever the device it was measured on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.comm.mesh import Mesh
from meshwright.parallel.engine import Engine
from meshwright.plan.folds.memory import memory
from meshwright.plan.plan import Execution
from meshwright.train import account
from meshwright.train.account import ledger_json, take_account
from meshwright.train.figures import Meter
from meshwright.verify.batches import global_batches
from tests.unit.plan.plans import make_plan


@pytest.mark.parametrize("cuda", [False, True])
def test_the_ledger_expects_of_each_rank_what_the_first_step_was_held_against(
    cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms are single kernels on CUDA; a ledger that forgot so expected more of rank 0 than its own first step."""
    eager = make_plan(micro=8)
    engine = Engine(eager, Mesh.of(eager).start())
    engine.step(global_batches(eager, 1)[0], 1e-3)
    plan = engine.plan = replace(eager, execution=Execution(compile=True))  # where a CPU's norms are many kernels
    monkeypatch.setattr(account, "_on_cuda", lambda engine: cuda)
    monkeypatch.setattr(account, "_device_memory", lambda engine: {"reserved": None, "device": None})
    taken = take_account(engine, 1)
    told = ledger_json(engine, taken, Meter(plan, 1))["predicted"]["memory"]
    assert told["per_rank"] == [{"rank": 0, "peak": taken.timeline.peak_bytes}]
    assert told["peak"] == memory(plan, 0, fused_norms=cuda).peak_bytes
    assert memory(plan, 0, fused_norms=True).peak_bytes < memory(plan, 0).peak_bytes
