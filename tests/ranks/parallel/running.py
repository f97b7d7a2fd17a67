"""An engine under observation: everything a rank's step is compared by, gathered to whole logical tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.layout.axes import Degrees
from meshwright.parallel.engine import Engine, StepResult
from meshwright.parallel.store import Store
from meshwright.plan.action import Action, Op
from meshwright.plan.folds.ledger import Row
from meshwright.plan.plan import Plan
from meshwright.testing.exact import figure_of_difference
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.plain import STEPS, Trained


@dataclass
class Ran:
    """One entry a step; tensors are whole, by name."""

    results: list[StepResult] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    rows: list[tuple[Row, ...]] = field(default_factory=list)


def engine_of(plan: Plan) -> Engine:
    """An engine on all ranks of the launch."""
    return Engine(plan, mesh_of(plan.degrees, plan.sharding.within))


@lru_cache(maxsize=8)
def mesh_of(degrees: Degrees, within: int) -> Mesh:
    """Communicators are made once a launch, whatever the number of cases."""
    mesh = Mesh(degrees.dp, degrees.tp, degrees.pp, degrees.cp, degrees.ep, shard_within=within)
    return mesh.start()


def train(engine: Engine, steps: int = STEPS, rate: float | None = None) -> Ran:
    """Run the plan's made-up batches and keep everything."""
    ran = Ran()
    plan = engine.plan
    for batch in global_batches(plan, steps):
        taken: dict[str, Tensor] = {}

        def before(action: Action, into: dict[str, Tensor] = taken) -> None:
            if action.op is Op.UPDATE:  # observers may not communicate: pieces now, gathered after the step
                into[str(action.bucket)] = engine.stores[action.bucket].reduced.clone()

        engine.observe(before)
        engine.mesh.ledger.clear()
        share = local_share(plan, batch, engine.mesh.rank)
        ran.results.append(engine.step(share, plan.optimizer.learning_rate if rate is None else rate))
        ran.rows.append(engine.mesh.ledger.rows)
        engine.observe(None)
        held = [store for store in engine.stores if store.bucket.trainable]
        ran.gradients.append(whole(held, lambda store, into=taken: into[str(store.bucket.index)]))
        ran.weights.append(weights(engine))
    return ran


def weights(engine: Engine) -> dict[str, Tensor]:
    """The parameters in the compute dtype, whole."""
    return whole(engine.stores, lambda store: store.shard if store.shard is not None else own(store, store.whole))


def masters(engine: Engine) -> dict[str, Tensor]:
    return whole([store for store in engine.stores if store.bucket.trainable], lambda store: store.master)


def own(store: Store, flat: Tensor) -> Tensor:
    return flat[store.first : store.last]


def whole(stores: list[Store], piece: Callable[[Store], Tensor]) -> dict[str, Tensor]:
    """Gather (first, elements) of every store from all ranks; where pieces overlap, they must be equal bit for bit."""
    mine = [(store.first, piece(store).detach().clone()) for store in stores]
    parts: list[list[tuple[int, Tensor]]] = [mine]
    if dist.is_initialized():
        parts = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, mine)
    out: dict[str, Tensor] = {}
    for index, store in enumerate(stores):
        flat = mine[index][1].new_zeros(store.bucket.numel)
        filled = torch.zeros(store.bucket.numel, dtype=torch.bool)
        for first, elements in (rank[index] for rank in parts):
            span = slice(first, first + elements.numel())
            seen = filled[span]
            torch.testing.assert_close(flat[span][seen], elements[seen], rtol=0, atol=0, equal_nan=True)
            flat[span], filled[span] = elements, True
        for segment in store.bucket.segments:
            assert bool(filled[segment.offset : segment.stop].all()), f"{segment.name} is held by nobody"
            out[segment.name] = flat[segment.offset : segment.stop].view(segment.shape)
    return out


def difference(actual: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> float:
    """The largest figure of difference over all steps and tensors; both must hold the same names."""
    worst = 0.0
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        largest = max(float(tensor.abs().max()) for tensor in other.values())
        worst = max(worst, *(figure_of_difference(one[name], other[name], largest) for name in other))
    return worst


def check_parity(ran: Ran, plain: Trained, bound: float = 1e-12) -> None:
    """Loss, every gradient, norm and weights of every step."""
    losses = torch.tensor([result.loss for result in ran.results], dtype=torch.float64)
    norms = torch.tensor([result.grad_norm for result in ran.results], dtype=torch.float64)
    figures = {
        "loss": figure_of_difference(losses, torch.tensor(plain.losses, dtype=torch.float64)),
        "norm": figure_of_difference(norms, torch.tensor(plain.norms, dtype=torch.float64)),
        "gradient": difference(ran.gradients, plain.gradients),
        "weights": difference(ran.weights, plain.weights),
    }
    assert all(figure <= bound for figure in figures.values()), figures
