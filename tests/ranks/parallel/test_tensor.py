"""Tensor and sequence parallelism equal one process, to the last digits of float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.arch.arch import Activation, Arch, Norm
from meshwright.checkpoint.held import gradients, parameters
from meshwright.comm.exchange import Held
from meshwright.comm.mesh import Mesh
from meshwright.config.choices import Recompute
from meshwright.layout.axes import Degrees
from meshwright.parallel.engine import Engine
from meshwright.plan.action import Action, Op
from meshwright.plan.folds.ledger import ledger
from meshwright.plan.plan import Batch, ContextSplit, Data, Execution, Optimizer, Pipeline, Plan, Sharding, Start
from meshwright.plan.rules import canonical, check_plan
from meshwright.plan.stages import balanced
from meshwright.testing.ranks import run_cases
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.plain import ADAMW, DOUBLE, LENGTH, RATE, SEQUENCES, STEPS, plain_training
from tests.ranks.parallel.running import Ran, check_parity

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": True},
    "mistral": {"sliding_window": 5},
    "gpt2": {
        "norm": Norm.LAYER, "activation": Activation.GELU_TANH, "gated": False, "rope": None, "max_positions": 16,
        "qkv_bias": True, "output_bias": True, "mlp_bias": True, "tie_embeddings": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A layout, and a model of twelve query heads whose vocabulary of 101 nothing divides."""

    family: str = "llama"
    tp: int = 2
    sequence: bool = False
    dp: int = 1
    zero: int = 0
    pp: int = 1
    kv_heads: int = 12
    heads: int = 12
    tied: bool | None = None
    dropout: float = 0.0
    accumulation: int = 1
    recompute: Recompute = Recompute.NONE
    optimizer: Optimizer = ADAMW

    @property
    def name(self) -> str:
        default = Case()
        changed = {key: getattr(self, key) for key in self.__dataclass_fields__}
        return ", ".join(
            f"{key} {value}" for key, value in changed.items() if key != "optimizer" and value != getattr(default, key)
        )

    @property
    def arch(self) -> Arch:
        fields = dict(FAMILIES[self.family])
        if self.tied is not None:
            fields["tie_embeddings"] = self.tied
        sizes = {"hidden": 24, "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": 4, "ffn": 48, "vocab": 101}
        return Arch(self.family, layers=2, dropout=self.dropout, **sizes, **fields)

    @property
    def plan(self) -> Plan:
        micro = SEQUENCES // (self.dp * self.accumulation)
        plan = Plan(
            name="tiny",
            seed=0,
            arch=self.arch,
            start=Start(),
            data=Data(sequence_length=LENGTH),
            batch=Batch(SEQUENCES, micro),
            optimizer=self.optimizer,
            precision=DOUBLE,
            degrees=Degrees(dp=self.dp, tp=self.tp, pp=self.pp),
            sharding=Sharding(self.zero),
            pipeline=Pipeline(stages=balanced([1.0] * 2, 0.0, 0.0, self.pp)),
            context=ContextSplit(),
            execution=Execution(recompute=self.recompute, sequence=self.sequence),
        )
        plan = canonical(plan)
        check_plan(plan)
        return plan


def train(engine: Engine, steps: int = STEPS) -> Ran:
    """Run the plan's made-up batches; everything that is held twice must be held alike, bit for bit."""
    ran, plan = Ran(), engine.plan
    for batch in global_batches(plan, steps):
        taken: Held = {}

        def before(action: Action, into: Held = taken) -> None:
            if action.op is Op.UPDATE and not into:
                into.update({piece: view.clone() for piece, view in gradients(engine).items()})

        engine.observe(before)
        engine.mesh.ledger.clear()
        ran.results.append(engine.step(local_share(plan, batch, engine.mesh.rank), RATE))
        ran.rows.append(engine.mesh.ledger.rows)
        engine.observe(None)
        ran.gradients.append(whole(plan, taken))
        ran.weights.append(whole(plan, parameters(engine)))
    return ran


def whole(plan: Plan, held: Held) -> dict[str, Tensor]:
    """Logical tensors from the pieces of all ranks."""
    mine = [(piece, view.clone()) for piece, view in held.items()]
    parts: list[list[Any]] = [[]] * plan.degrees.ranks
    dist.all_gather_object(parts, mine)
    from meshwright.arch.parameters import tensors

    shapes = {tensor.name: tensor.shape for tensor in tensors(plan.arch)}
    out = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in shapes.items()}
    for piece, values in (each for part in parts for each in part):
        span = tuple(slice(a, b) for a, b in zip(piece.rectangle.start, piece.rectangle.stop, strict=True))
        view = out[piece.tensor][span]
        seen = ~view.isnan()
        assert torch.equal(view[seen], values[seen]), f"copies of {piece.tensor} differ"
        view.copy_(values)
    missing = [name for name, tensor in out.items() if bool(tensor.isnan().any())]
    assert not missing, f"held by nobody: {missing}"
    return out


def equals_one_process(rank: int, case: Case) -> None:
    plan = case.plan
    mesh = Mesh.of(plan).start()
    engine = Engine(plan, mesh)
    ran = train(engine)
    check_parity(ran, plain_training(plan))
    predicted = set(ledger(plan, rank))
    assert all(set(rows) == predicted for rows in ran.rows), (ran.rows[0], predicted)
    mesh.close()


@pytest.mark.parametrize("tp", [2, 4])
def test_equals_one_process(tp: int) -> None:
    cases = [Case(tp=tp, sequence=sequence, tied=tied) for sequence in (False, True) for tied in (False, True)]
    run_cases(equals_one_process, tp, cases)
