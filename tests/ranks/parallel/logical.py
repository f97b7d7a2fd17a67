"""A run of any layout as logical tensors, gathered to rank 0 and compared there with one process.

Every rank sends its pieces and what it reports; rank 0 alone assembles, checks copies against each other bit for bit,
and trains the plain model: sixteen ranks on two cores would otherwise do all of it sixteen times.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.arch.parameters import tensors
from meshwright.checkpoint.held import gradients, parameters
from meshwright.comm.mesh import Mesh
from meshwright.comm.views import Held
from meshwright.layout.axes import Axis, Degrees
from meshwright.parallel.engine import Engine
from meshwright.plan.action import Action, Op
from meshwright.plan.plan import Plan
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.plain import STEPS, plain_training
from tests.ranks.parallel.running import Ran, check_parity


def shared_mesh(plan: Plan) -> Mesh:
    """The plan's mesh, started. Communicators are made once a launch, whatever the number of cases: do not close it."""
    mesh = Mesh.of(plan)
    return _mesh(mesh.degrees, mesh.shard_within, mesh.kv_copies, mesh.ulysses)


@lru_cache(maxsize=8)
def _mesh(degrees: Degrees, within: int, kv_copies: int, ulysses: int) -> Mesh:
    ways = {axis.value: degrees.on(axis) for axis in Axis}
    return Mesh(**ways, order=degrees.order, shard_within=within, kv_copies=kv_copies, ulysses=ulysses).start()


def train(engine: Engine, steps: int = STEPS) -> Ran:
    """Run the plan's made-up batches; gradients and weights are whole on rank 0 and empty on the others."""
    ran, plan = Ran(), engine.plan
    for batch in global_batches(plan, steps):
        taken: Held = {}

        def before(action: Action, into: Held = taken) -> None:
            if action.op is Op.UPDATE and not into:  # observers may not communicate: gathered after the step
                into.update({piece: view.clone() for piece, view in gradients(engine).items()})

        engine.observe(before)
        engine.mesh.ledger.clear()
        share = local_share(plan, batch, engine.mesh.rank)
        ran.results.append(engine.step(share, plan.optimizer.learning_rate))
        ran.rows.append(engine.mesh.ledger.rows)
        engine.observe(None)
        ran.gradients.append(whole(plan, taken))
        ran.weights.append(whole(plan, parameters(engine)))
    return ran


def whole(plan: Plan, held: Held) -> dict[str, Tensor]:
    """On rank 0: logical tensors from the pieces of all ranks; where pieces overlap they must be equal bit for bit."""
    parts = to_first([(piece, view.clone()) for piece, view in held.items()])
    if not parts:
        return {}
    out = {tensor.name: torch.full(tensor.shape, torch.nan, dtype=torch.float64) for tensor in tensors(plan.arch)}
    for piece, values in (each for part in parts for each in part):
        view = out[piece.tensor][tuple(map(slice, piece.rectangle.start, piece.rectangle.stop))]
        seen = ~view.isnan()
        assert torch.equal(view[seen], values[seen]), f"copies of {piece.tensor} differ"
        view.copy_(values)
    missing = [name for name, tensor in out.items() if bool(tensor.isnan().any())]
    assert not missing, f"held by nobody: {missing}"
    return out


def check_one_process(ran: Ran, plan: Plan) -> None:
    """Loss and norm as every rank reports them, and every gradient and weight of every step: rank 0 compares."""
    reported = to_first([(result.loss, result.grad_norm) for result in ran.results])
    if reported:
        assert all(one == reported[0] for one in reported), f"ranks report different losses or norms: {reported}"
        check_parity(ran, plain_training(plan, len(ran.results)))


def to_first(mine: Any) -> list[Any]:
    """What every rank gives, in rank order, on rank 0; nothing on the others."""
    if dist.get_world_size() == 1:
        return [mine]
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, parts, dst=0)
    return parts or []
