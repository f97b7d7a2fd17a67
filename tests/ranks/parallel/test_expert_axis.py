"""Experts on several ranks, one step of each layout beside the plain model: gradients, norm, weights, rows, ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.arch.arch import Experts
from meshwright.checkpoint.held import gradients, parameters
from meshwright.comm.views import Held
from meshwright.config.choices import Balance, OptimizerKind, Recompute
from meshwright.data.batch import IGNORED, Batch, batch_place, local_share
from meshwright.layout.rows import whole_rows
from meshwright.model import build_decoder, initialise, rows_to_torch
from meshwright.model.routers import prepare_routers, routers_of
from meshwright.parallel.engine import Engine
from meshwright.plan.action import Action, Op
from meshwright.plan.folds.ledger import ledger
from meshwright.plan.plan import Moe, Optimizer, Plan
from meshwright.plan.rules import canonical
from meshwright.testing.exact import figure_of_difference
from meshwright.testing.ranks import run_cases
from meshwright.verify.batches import global_batches
from tests.ranks.parallel.logical import shared_mesh, to_first, whole
from tests.ranks.parallel.plain import DOUBLE
from tests.unit.plan.plans import make_plan

SEQUENCES, LENGTH, COUNT, RATE, CLIP = 8, 8, 8, 0.1, 0.5
TOKENS = SEQUENCES * LENGTH
TERM, BIAS, NONE = Moe(Balance.AUXILIARY, auxiliary_loss=0.01), Moe(Balance.BIAS), Moe(Balance.NONE)
Z = Moe(Balance.NONE, z_loss=0.1)
SGD = Optimizer(kind=OptimizerKind.SGD, weight_decay=0.0, clip_norm=CLIP)
LAYOUTS: Sequence[dict[str, Any]] = (
    {"dp": 4}, {"ep": 4}, {"dp": 2, "ep": 2}, {"pp": 2, "dp": 2}, {"tp": 2, "ep": 2}, {"dp": 2, "cp": 2},
    {"ep": 2, "cp": 2},
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A layout on four ranks. `trained` False: no label counts, so that terms alone are differentiated. `wanted`: the
    experts that biases leave to the tokens of each part of the batch."""

    plan: Plan
    trained: bool = True
    wanted: tuple[tuple[int, ...], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.plan.degrees}, {self.plan.moe}, experts {self.wanted or 'chosen'}"

    @property
    def batch(self) -> Batch:
        (batch,) = global_batches(self.plan, 1)
        return batch if self.trained else replace(batch, labels=np.full_like(batch.labels, IGNORED))

    def bias(self, part: int) -> Tensor | None:
        """(E,) of the tokens of a part of the batch."""
        if not self.wanted:
            return None
        bias = torch.full((COUNT,), -10.0)
        bias[list(self.wanted[part % len(self.wanted)])] = 10.0
        return bias


@dataclass
class Seen:
    """What one rank saw; figures against the plain model on rank 0 alone."""

    ledger_equal: bool
    sent: int
    received: int
    differences: dict[str, float]
    unused: float
    weights: float
    evaluation: float = 0.0


def case(moe: Moe, accumulation: int = 1, normalise: bool = True, dense_layers: int = 0, **fields: Any) -> Case:
    layout = {name: fields.pop(name) for name in ("dp", "tp", "pp", "cp", "ep", "zero", "recompute") if name in fields}
    arch = {"hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 24, "vocab": 67}
    arch["experts"] = Experts(COUNT, 2, 12, normalise=normalise, dense_layers=dense_layers)
    micro = SEQUENCES // (layout.get("dp", 1) * layout.get("ep", 1) * accumulation)
    plan = make_plan(micro=micro, accumulation=accumulation, arch=arch, precision=DOUBLE, optimizer=SGD, **layout)
    data = replace(plan.data, sequence_length=LENGTH)
    return Case(canonical(replace(plan, arch=replace(plan.arch, family="mixtral"), data=data, moe=moe)), **fields)


def step(rank: int, case: Case) -> Seen:
    """One step, held against the plan and against one process."""
    plan, mesh = case.plan, shared_mesh(case.plan)
    engine = Engine(plan, mesh)
    assert engine.balancer is not None
    place, parts = batch_place(plan, rank)
    bias = case.bias(place * len(case.wanted) // parts)
    for each in engine.balancer.biases.values() if bias is not None else ():
        each.copy_(bias)
    summed: Held = {}

    def before(action: Action) -> None:
        if action.op is Op.UPDATE and not summed:
            summed.update({piece: view.clone() for piece, view in gradients(engine).items()})

    engine.observe(before)
    mesh.ledger.clear()
    result = engine.step(local_share(plan, case.batch, rank), RATE)
    engine.observe(None)
    routed = engine.expert_axis.routed if engine.expert_axis is not None else {}
    equal = set(mesh.ledger.rows) == set(ledger(plan, rank, routed=routed))
    first = [exchange for (unit, _), exchange in routed.items() if unit == min(routed)[0]]
    sent, received = (sum(sum(getattr(each, way)) for each in first) for way in ("sent", "received"))
    found, weights = whole(plan, summed), whole(plan, parameters(engine))
    seen = Seen(equal, sent, received, {}, 0.0, 0.0)
    norms = to_first(result.grad_norm)
    if norms:
        assert len(set(norms)) == 1
        expected, start = plain(case)
        norm = float(torch.linalg.vector_norm(torch.cat([each.flatten() for each in expected.values()])))
        largest = max(float(each.abs().max()) for each in expected.values())
        seen.differences = {name: figure_of_difference(found[name], expected[name], largest) for name in expected}
        seen.differences["norm"] = abs(norms[0] / norm - 1)
        factor = min(CLIP / (norm + 1e-6), 1.0) * RATE
        seen.weights = max(float((weights[name] - start[name] + factor * expected[name]).abs().max()) for name in start)
        seen.unused = unused(case, found)
    if not case.wanted:
        seen.evaluation = evaluate(engine, case, weights)
    return seen


def unused(case: Case, found: dict[str, Tensor]) -> float:
    """The largest gradient of an expert that no token was left to."""
    wanted = {expert for part in case.wanted for expert in part} or set(range(COUNT))
    idle = [expert for expert in range(COUNT) if expert not in wanted]
    of_experts = [found[name][idle] for name in found if "experts" in name and idle]
    return max((float(each.abs().max()) for each in of_experts), default=0.0)


def evaluate(engine: Engine, case: Case, weights: dict[str, Tensor]) -> float:
    """How far an evaluation is from the plain model's, where its last sequences are padding; told by rank 0."""
    plan = case.plan
    (batch,) = global_batches(plan, 1)
    ids = np.where(np.arange(SEQUENCES) < SEQUENCES - 3, batch.rows.sample_ids, -1)
    labels = np.where(ids[:, None] < 0, IGNORED, batch.labels)
    batch = Batch(batch.inputs, labels, whole_rows(0, ids, LENGTH))
    found = engine.evaluate(local_share(plan, batch, engine.mesh.rank))
    if not weights:
        return 0.0
    model = build_decoder(plan.arch, dtype=torch.float64, device="cpu").eval()
    model.load_state_dict(weights, strict=True)
    assert engine.balancer is not None
    units = dict(enumerate(model.units))
    biases = prepare_routers(plan, units)
    for name, bias in engine.balancer.biases.items():
        biases[name].copy_(bias)
    rows = rows_to_torch(batch.rows, plan.arch, seed=plan.seed, dtype=torch.float64)
    with torch.no_grad():
        expected = model.loss(torch.from_numpy(batch.inputs), rows, torch.from_numpy(batch.labels), torch.tensor(1))
    assert found.trained_tokens == batch.trained_tokens > 0
    return abs(found.loss_sum / float(expected) - 1)


def plain(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the plain model, part after part of the batch, and its weights."""
    plan = case.plan
    model = build_decoder(plan.arch, dtype=torch.float64, device="cpu")
    initialise(model, plan.arch, plan.seed)
    units = dict(enumerate(model.units))
    prepare_routers(plan, units)
    parts = max(len(case.wanted), 1)
    count = torch.tensor(max(case.batch.trained_tokens, 1))
    for place in range(parts):
        batch, bias = case.batch.part(place, parts), case.bias(place)
        for router in routers_of(units).values() if bias is not None else ():
            router.bias = bias
        rows = rows_to_torch(batch.rows, plan.arch, seed=plan.seed, dtype=torch.float64)
        model.loss(torch.from_numpy(batch.inputs), rows, torch.from_numpy(batch.labels), count).backward()
    named = dict(model.named_parameters())
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}
    return found, {name: each.detach() for name, each in named.items()}


def check(cases: Sequence[Case]) -> None:
    by_rank = run_cases(step, 4, cases, timeout=160)
    for number, each in enumerate(cases):
        seen = [of_rank[number] for of_rank in by_rank]
        assert all(one.ledger_equal for one in seen), each.name
        worst = max(seen[0].differences, key=seen[0].differences.__getitem__)
        assert seen[0].differences[worst] <= 1e-12, (each.name, worst, seen[0].differences[worst])
        assert seen[0].weights <= 1e-13, each.name
        assert seen[0].unused == 0.0, each.name
        assert seen[0].evaluation <= 1e-13, each.name
        if each.plan.degrees.ep > 1:
            shares = 4 // (each.plan.degrees.tp * each.plan.degrees.pp)
            routing = [one for rank, one in enumerate(seen) if one.sent and rank % each.plan.degrees.tp == 0]
            assert len(routing) == shares
            assert {one.sent for one in routing} == {2 * TOKENS // shares}
            assert sum(one.received for one in routing) == 2 * TOKENS


def terms() -> Sequence[Case]:
    """B44: nothing flows but the auxiliary term, in one micro-batch and in two, or the z term."""
    once = [case(TERM, trained=False, **layout) for layout in LAYOUTS]
    twice = [case(TERM, 2, trained=False, **layout) for layout in LAYOUTS[1:5]]
    return [*once, *twice, case(Z, trained=False, ep=2, cp=2)]


def gradients_of_experts() -> Sequence[Case]:
    """B46: ep 1, 2 and 4 of one global batch, by SGD. B47: the router's gradient, weights of choices over their sum and
    not. B13, B15: the norm where experts are cut over ep and over tp."""
    return [
        case(NONE, dp=4),
        case(NONE, 2, dp=2, ep=2, zero=1),
        case(NONE, ep=4, zero=2),
        case(NONE, 2, ep=2, tp=2),
        case(NONE, ep=2, tp=2, normalise=False),
        case(NONE, 2, ep=2, pp=2, dense_layers=1),  # B38: a stage without experts
        case(BIAS, 2, ep=4, normalise=False, recompute=Recompute.FULL),  # B48: 64 tokens, 128 rows, made again or not
    ]


def idle_ranks() -> Sequence[Case]:
    """B50: a rank that gets no row at all, experts that no token anywhere chooses, ranks that keep to their own."""
    halves = ((0, 1, 2, 3), (4, 5, 6, 7))
    return [
        case(BIAS, ep=2, dp=2, zero=3, wanted=((0, 1),)),
        case(BIAS, 2, ep=4, zero=2, wanted=((0, 1, 2),)),
        case(BIAS, ep=2, tp=2, wanted=halves),
        case(BIAS, ep=2, tp=2, wanted=halves[::-1]),
        case(BIAS, dp=4, zero=2, wanted=halves),
    ]


@pytest.mark.timeout(170)
def test_a_step_of_any_layout_is_that_of_the_plain_model() -> None:
    check([*terms(), *gradients_of_experts(), *idle_ranks()])
