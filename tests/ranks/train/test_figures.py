"""The figures of a run in its files: utilisation where a peak is known, the peak of memory, hardware FLOPs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.comm.mesh import Mesh
from meshwright.launch.status import RankStatus
from meshwright.parallel.engine import Engine
from meshwright.plan.plan import Plan
from meshwright.price.calibration import Measured, ProductTime, calibrated, write_cluster
from meshwright.testing.ranks import run, run_cases
from meshwright.train.account import hardware_flops
from meshwright.train.job import Job
from meshwright.train.loop import train_joined
from meshwright.train.peak import PeakWatch
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.train.jobs import steps, tiny_job

RATE = 2e9


def trained(rank: int, job: Job) -> None:
    train_joined(RankStatus(), job)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, dict[str, Any], str]:
    """A run of two ranks on a machine that was measured: the job, its ledger, and what it said."""
    folder = tmp_path_factory.mktemp("known")
    product = ProductTime("float64", 256, 256, 256, 2 * 256**3 / RATE)
    write_cluster(
        calibrated(Measured(2, "CPU", "cpu", 1e10, 1e10, (product,))), folder / ".config/meshwright/local.toml"
    )
    job = tiny_job(folder, 2)
    said = folder / "said"
    run(speaking, 2, job, str(said), environment={"HOME": str(folder)})
    return job, json.loads((job.folder / "ledger.json").read_text()), said.read_text()


def speaking(rank: int, job: Job, file: str) -> None:
    """Train with what rank 0 says kept in a file."""
    import sys

    if rank == 0:
        with open(file, "w") as sys.stdout:
            trained(rank, job)
    else:
        trained(rank, job)


def test_utilisation_is_model_flops_over_seconds_times_peak(known: tuple[Job, dict[str, Any], str]) -> None:
    """Two ranks of RATE each; M0 has 6 x 90112 + 24576 model FLOPs a token, and 6 x 64 more for its 257th."""
    job, ledger, said = known
    flops = (6 * (90_112 + 64) + 24_576) * 8 * 32
    assert ledger["measured"]["flops"]["model_per_step"] == flops
    assert len(steps(job)) == 6
    for line in steps(job):
        assert line["mfu"] == pytest.approx(flops / (line["seconds"] * 2 * RATE), rel=1e-9)
        assert f"MFU {line['mfu']:.1%} (6N + causal attention, of the measured peak)" in said
    whole = ledger["measured"]["time"]
    assert whole["mfu"] == pytest.approx(flops / (whole["step_seconds"] * 2 * RATE), rel=1e-9)
    table = said[said.index("of rank 0") :]
    (row,) = (line.split() for line in table.splitlines() if line.startswith("MFU"))
    assert row == ["MFU", "-", f"{whole['mfu']:.1%}"]
    assert "model FLOPs, MFU: 6N + causal attention, of the measured peak" in table


def test_without_a_peak_there_is_no_utilisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    job = tiny_job(tmp_path, 1, train={"steps": 1, "eval_every": 0})
    train_joined(RankStatus(), job)
    assert [line["mfu"] for line in steps(job)] == [None]


def test_peak_memory_is_what_the_allocator_held_activations_included(known: tuple[Job, dict[str, Any], str]) -> None:
    """It told parameters, gradients and optimizer alone: half of what the step held."""
    job, ledger, _ = known
    memory = ledger["measured"]["memory"]
    assert {line["peak_memory_bytes"] for line in steps(job)} == {memory["per_rank"][0]["peak"]}
    held = sum(memory[name] or 0 for name in ("parameters", "gradients", "optimizer", "master"))
    assert memory["per_rank"][0]["peak"] > 1.1 * held  # of which each is its own largest
    largest = ledger["predicted"]["memory"]
    assert all(memory[name] == largest[name] for name in ("parameters", "gradients", "optimizer", "master"))


LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "dp": {},
    "zero 3": {"parallel": {"zero": 3}},
    "pp": {"mesh": {"dp": 1, "pp": 2}},
    "tp": {"mesh": {"dp": 1, "tp": 2}},
    "masked, dropout": {"model": {"dropout": 0.1}, "data": {"documents": "masked"}},
}


def peaks(rank: int, plan: Plan) -> list[int]:
    """The peak of each of four steps, an evaluation between them."""
    mesh = Mesh.of(plan).start()
    engine, found = Engine(plan, mesh), []
    for batch in global_batches(plan, 4):
        share = local_share(plan, batch, rank)
        with PeakWatch(engine.allocator) as watch:
            engine.step(share, 1e-3)
        engine.evaluate(share)
        found.append(watch.num_bytes)
    mesh.close()
    return found


@pytest.mark.prove
def test_every_step_peaks_where_the_first_did(tmp_path: Path) -> None:
    """So that one measured step tells the peak of a run: equal within a few scalars."""
    plans = [tiny_job(tmp_path, 2, **sections).plan for sections in LAYOUTS.values()]
    for of_rank in run_cases(peaks, 2, plans):
        for name, (first, *later) in zip(LAYOUTS, of_rank, strict=True):
            assert all(abs(each - first) <= 1024 for each in later), name


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_hardware_flops_are_those_a_step_is_counted_to_do(tmp_path: Path, recompute: str) -> None:
    """Products of the step in work, attention's as batched products of all keys: twice its causal half."""
    plan = tiny_job(tmp_path, 1, parallel={"recompute": recompute}, precision={"compute": "float32"}).plan
    (batch,) = global_batches(plan, 1)
    engine = Engine(plan, Mesh.of(plan).start())
    with sdpa_kernel(SDPBackend.MATH), Counting() as counting:
        engine.step(local_share(plan, batch, 0), 1e-3)
    assert counting.attention > 0
    assert counting.products + counting.attention // 2 == hardware_flops(plan)


class Counting(TorchDispatchMode):
    """FLOPs of matrix products, and of batched ones, which attention alone makes.

    Without the modules that torch's own mode tracks: their hooks do not stand a recipe that autograd does not follow.
    """

    products = attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            self.attention += 2 * out.numel() * args[-1].shape[-2]
        elif packet in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.products += 2 * out.numel() * args[-1].shape[-2]
        return out


def test_a_step_is_accounted_by_the_rows_that_its_routers_chose(tmp_path: Path) -> None:
    """With even loads 64 rows of each micro-batch would go, and as many come: a router does otherwise."""
    model = {"family": "mixtral", "ffn": 64, "experts": 4, "experts_per_token": 2}
    once = {"steps": 1, "eval_every": 0}
    job = tiny_job(tmp_path, 2, mesh={"dp": 1, "ep": 2}, model=model, train=once, track={"strict": True})
    run(trained, 2, job)
    told = json.loads((job.folder / "ledger.json").read_text())
    assert (told["traffic_equal"], told["states_equal"], told["peak_near"]) == (True, True, True)
    said, seen = ({(each["group"], each["operation"], each["phase"]): each for each in told[side]["traffic"]}
                  for side in ("predicted", "measured"))  # fmt: skip
    assert said == seen
    exchange = seen["ep", "all_to_all", "forward"]
    even = 4 * 2 * (4 * 8 + 2 * 64 * 64 * 8)  # micro-batches, blocks; loads, rows there and back
    assert exchange["calls"] == 4 * 2 * 3
    assert exchange["payload_bytes"] != even
    assert exchange["payload_bytes"] == pytest.approx(even, rel=0.3)
    assert exchange["wire_bytes"] != exchange["sent_bytes"]
