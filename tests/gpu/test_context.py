"""Attention block by block on CUDA: its fused kernel in 16 bits, products elsewhere, rings on NCCL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.launch.join import join_file, leave
from meshwright.layout.axes import Degrees
from meshwright.parallel.context_kernels import attend_block, block_gradients, merge_
from meshwright.parallel.engine import Engine
from meshwright.plan.folds.ledger import ledger
from meshwright.plan.folds.traffic import Transport
from meshwright.testing.ranks import run
from meshwright.verify.batches import global_batches
from tests.ranks.parallel.plain import plain_training
from tests.ranks.parallel.test_context import GATHER, RING, ULYSSES, Case

WORLD = 2
pytestmark = pytest.mark.gpu
needs_one = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason=f"needs {WORLD} CUDA devices")


@needs_one
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_blocks_add_up_to_the_whole(dtype: torch.dtype, kv_heads: int) -> None:
    """512 queries, their own keys and as many before them: out and gradients beside float64."""
    random = torch.Generator("cuda").manual_seed(0)
    shapes = (2, 512, 8, 64), (2, 1024, kv_heads, 64), (2, 1024, kv_heads, 64), (2, 512, 8, 64)
    q, k, v, g = (torch.randn(shape, generator=random, device="cuda").to(dtype) for shape in shapes)
    exact = [each.double().transpose(1, 2).requires_grad_() for each in (q, k, v)]
    seen = torch.ones(512, 1024, dtype=torch.bool, device="cuda").tril(512)
    whole = torch.nn.functional.scaled_dot_product_attention(*exact, attn_mask=seen, enable_gqa=True)
    wanted = torch.autograd.grad(whole, exact, g.double().transpose(1, 2))

    own, before = ((k[:, part], v[:, part]) for part in (slice(512, None), slice(None, 512)))
    out, log_sum = attend_block(q, *own, None, True)
    merged = out.float().contiguous()
    merge_(merged, log_sum, *attend_block(q, *before, None, False))
    out = merged.to(dtype)
    near = {"rtol": 0, "atol": 40 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out.double(), whole.transpose(1, 2), **near)
    of_own = block_gradients(g, q, *own, out, log_sum, None, True)
    of_before = block_gradients(g, q, *before, out, log_sum, None, False)
    found = of_own[0] + of_before[0], *(torch.cat((of_before[i], of_own[i]), 1) for i in (1, 2))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.transpose(1, 2), rtol=0, atol=4 * near["atol"])


def steps(rank: int, folder: Path) -> None:
    leave()
    join_file(folder / "steps", rank, WORLD, "cuda")
    for context in (RING, GATHER, ULYSSES):
        for masked in (False, True):
            plan = Case(context, masked=masked, kv_heads=2).plan
            mesh = Mesh.of(plan).start()
            engine = Engine(plan, mesh, f"cuda:{rank}")
            plain = plain_training(replace(plan, degrees=Degrees()), 3)
            for batch, loss, norm in zip(global_batches(plan, 3), plain.losses, plain.norms, strict=True):
                mesh.ledger.clear()
                result = engine.step(engine.share(batch), plan.optimizer.learning_rate)
                assert result.loss == pytest.approx(loss, rel=1e-10)
                assert result.grad_norm == pytest.approx(norm, rel=1e-10)
                assert set(mesh.ledger.rows) == set(ledger(plan, rank, transport=Transport.NCCL))
            mesh.close()
    leave()


@needs_two
def test_steps_equal_one_process(tmp_path: Path) -> None:
    run(steps, WORLD, tmp_path)
