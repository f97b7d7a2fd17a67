"""Asynchronous tensor parallelism on NCCL: the code of `comm/ring.py`, its hops on a stream of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.comm import ring
from meshwright.comm.mesh import Mesh
from meshwright.comm.registry import registered
from meshwright.launch.join import join_file, leave
from meshwright.layout.groups import GroupName
from meshwright.parallel.engine import Engine
from meshwright.plan.folds.ledger import ledger
from meshwright.plan.folds.traffic import Transport
from meshwright.testing.exact import check_equal, whole
from meshwright.testing.ranks import run
from meshwright.verify.batches import global_batches
from tests.ranks.parallel.test_tensor import Case

WORLD = 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason=f"needs {WORLD} CUDA devices"),
]


def products(rank: int, folder: Path) -> None:
    """Whole numbers in float32: bit for bit the plain products, again and again while other work is queued."""
    leave()
    join_file(folder / "products", rank, WORLD, "cuda")
    mesh, size = Mesh(tp=WORLD).start(), 512
    with registered({"ring": replace(mesh.communicator(GroupName.TP), ring=True)}):
        for seed in range(20):
            x = whole(WORLD * size, size, seed=seed).cuda()
            weights = [whole(size, size, seed=100 + seed + r).cuda() for r in range(WORLD)]
            gathered, spans = ring.entering(x.chunk(WORLD)[rank], "ring", True)
            y = torch.empty_like(x)
            for low, high in spans:
                torch.mm(gathered[low:high], weights[rank], out=y[low:high])
            check_equal(y, x @ weights[rank], "gathered")
            parts = [(x[:, :size] @ weight) for weight in weights]
            mine = parts[rank]
            own = ring.begin_leaving(lambda low, high, mine=mine: mine[low:high].clone(), len(mine), "ring", True)()
            check_equal(own, (parts[0] + parts[1]).chunk(WORLD)[rank], "scattered")
    mesh.close()
    leave()


def steps(rank: int, folder: Path) -> None:
    """The same steps round a ring and at once, in float64."""
    leave()
    join_file(folder / "steps", rank, WORLD, "cuda")
    found = []
    for round_ in (False, True):
        plan = Case("gpt2", sequence=True, ring=round_).plan
        mesh = Mesh.of(plan).start()
        engine = Engine(plan, mesh, f"cuda:{rank}")
        found.append(
            [engine.step(engine.share(batch), plan.optimizer.learning_rate) for batch in global_batches(plan, 3)]
        )
        mesh.ledger.clear()
        engine.step(engine.share(global_batches(plan, 1)[0]), plan.optimizer.learning_rate)
        assert set(mesh.ledger.rows) == set(ledger(plan, rank, transport=Transport.NCCL))
        mesh.close()
    for one, other in zip(*found, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-12)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-12)
    leave()


def test_products_round_a_ring_of_devices(tmp_path: Path) -> None:
    run(products, WORLD, tmp_path)


def test_steps_round_a_ring_equal_plain_ones(tmp_path: Path) -> None:
    run(steps, WORLD, tmp_path)
