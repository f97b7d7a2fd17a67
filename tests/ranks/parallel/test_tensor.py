"""Tensor and sequence parallelism equal one process, to the last digits of float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.arch.arch import Activation, Arch, Norm
from meshwright.checkpoint.held import parameters
from meshwright.comm.mesh import Mesh
from meshwright.config.choices import Recompute
from meshwright.layout.axes import Degrees
from meshwright.model import build_decoder, initialise
from meshwright.parallel.engine import Engine
from meshwright.parallel.split import WeightProducts
from meshwright.parallel.tensor import apply_tensor, tensor_axis
from meshwright.plan.folds.ledger import ledger
from meshwright.plan.plan import Batch, ContextSplit, Data, Execution, Optimizer, Pipeline, Plan, Sharding, Start
from meshwright.plan.rules import canonical, check_plan
from meshwright.plan.stages import balanced
from meshwright.testing.ranks import run_cases
from tests.ranks.parallel.logical import check_one_process, shared_mesh, train, whole
from tests.ranks.parallel.plain import ADAMW, DOUBLE, LENGTH, SEQUENCES, SGD

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
    compile: bool = False
    ring: bool = False
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
            execution=Execution(
                recompute=self.recompute,
                sequence=self.sequence,
                compile=self.compile,
                asynchronous_tensor=self.ring,
            ),
        )
        plan = canonical(plan)
        check_plan(plan)
        return plan


def equals_one_process(rank: int, case: Case) -> None:
    plan = case.plan
    engine = Engine(plan, shared_mesh(plan))
    start = whole(plan, parameters(engine))
    assert rank or all(torch.equal(start[name], values) for name, values in start_values(plan).items())
    ran = train(engine)
    check_one_process(ran, plan)
    predicted = set(ledger(plan, rank))
    assert all(set(rows) == predicted for rows in ran.rows), (ran.rows[0], predicted)


def start_values(plan: Plan) -> dict[str, Tensor]:
    model = build_decoder(plan.arch, dtype=torch.float64, device="cpu")
    initialise(model, plan.arch, plan.seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


TWO = [
    Case(tied=True),
    Case(tied=False, sequence=True, dropout=0.1, optimizer=SGD),
    Case("qwen2", sequence=True, kv_heads=1),
    Case("qwen3", kv_heads=2, accumulation=2),
    Case("mistral", sequence=True, recompute=Recompute.FULL, accumulation=2),
    Case("gpt2", sequence=True, dropout=0.1),
    Case("gpt2", kv_heads=1),
    Case("qwen2", sequence=True, ring=True, kv_heads=1, dropout=0.1, optimizer=SGD),
    Case("gpt2", sequence=True, ring=True, recompute=Recompute.SELECTIVE, accumulation=2),
    Case("mistral", sequence=True, ring=True, recompute=Recompute.FULL),
]
THREE = [
    Case(tp=3, sequence=True),
    Case("gpt2", tp=3, sequence=True, kv_heads=1),
    Case("qwen3", tp=3, kv_heads=3),
    Case("qwen3", tp=3, sequence=True, ring=True, kv_heads=1, tied=True),
]
FOUR = [
    Case(tp=4, sequence=True, kv_heads=2, dropout=0.1),
    Case("qwen3", tp=4, kv_heads=1, sequence=True),
    Case("qwen2", tp=4, kv_heads=2),
    Case("gpt2", tp=4, kv_heads=2, sequence=True, accumulation=2),
    *(Case(tp=2, dp=2, zero=zero, sequence=zero % 2 == 1, kv_heads=1, accumulation=2) for zero in range(4)),
    Case("gpt2", tp=2, dp=2, zero=3, sequence=True, dropout=0.1, recompute=Recompute.FULL),
    Case("qwen2", tp=2, dp=2, zero=2, kv_heads=2),
    Case("llama", tp=2, pp=2, sequence=True, tied=True, accumulation=4),
    Case("gpt2", tp=4, sequence=True, ring=True, kv_heads=2, dropout=0.1),
    Case("llama", tp=2, dp=2, zero=3, sequence=True, ring=True, accumulation=2),
    Case("gpt2", tp=2, pp=2, accumulation=4, dropout=0.1),
]


@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (3, THREE), (4, FOUR)], ids=["2", "3", "4"])
def test_equals_one_process(ranks: int, cases: list[Case]) -> None:
    run_cases(equals_one_process, ranks, cases, timeout=110)


def everything(tp: int, dp: int) -> list[Case]:
    """Every legal combination of the axis with its features, families, key heads, tying, dropout and ZeRO."""
    heads = 24 if tp == 8 else 12
    return [
        Case(family, tp, sequence, dp, zero, kv_heads=kv_heads, heads=heads, tied=tied, dropout=dropout, ring=ring)
        for family in FAMILIES
        for sequence, ring in ((False, False), (True, False), (True, True))
        for zero in (range(4) if dp > 1 else (0,))
        for kv_heads in (1, 2, heads)
        if kv_heads % tp == 0 or tp % kv_heads == 0
        for tied, dropout in ((False, 0.0), (True, 0.1))
    ]


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (3, 2), (4, 2), (8, 2)])
def test_every_legal_combination_equals_one_process(tp: int, dp: int) -> None:
    run_cases(equals_one_process, tp * dp, everything(tp, dp), timeout=3500)


def ignores_padding(rank: int, case: Case) -> None:
    """The rows that stand for no token hold 1e4: nothing that is reported changes by a bit."""
    plan, results = case.plan, []
    mesh = Mesh.of(plan).start()
    for filled in (False, True):
        engine = Engine(plan, mesh)
        padding = []
        for store in engine.stores:
            for segment in store.bucket.segments:
                box = segment.owner.rectangle(plan.degrees, mesh.coordinates)
                if box.numel < segment.numel:
                    padding.append(store.parameters[segment.name][box.extent[0] :])
        assert len(padding) == (2 if rank == case.tp - 1 else 0)
        if filled:
            for rows in padding:
                rows.data.fill_(1e4)
        ran = train(engine, 2)
        results.append((ran.results, ran.gradients))
    assert results[0][0] == results[1][0]
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    mesh.close()


@pytest.mark.parametrize("tp", [2, 4])
def test_what_padding_holds_does_not_matter(tp: int) -> None:
    run_cases(ignores_padding, tp, [Case(tp=tp, sequence=sequence, tied=False) for sequence in (False, True)])


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_compiled_units_of_every_family_equal_one_process() -> None:
    """Every unit is one graph (a break is an error), and what it sends is counted as ever."""
    ways = [{"sequence": False}, {"sequence": True}, {"sequence": True, "ring": True}]
    cases = [Case(family, compile=True, **way) for family in FAMILIES for way in ways]
    run_cases(equals_one_process, 2, cases, timeout=890)


def test_apply_twice_is_an_error() -> None:
    run_cases(applied_twice, 2, [Case()])


def applied_twice(rank: int, case: Case) -> None:
    plan = case.plan
    mesh = Mesh.of(plan).start()
    engine = Engine(plan, mesh)
    axis = tensor_axis(plan, mesh.coordinates, "tp", WeightProducts(engine.stores))
    with pytest.raises(ValueError, match="tensor-parallel already"):
        apply_tensor([engine.model.layers[0]], axis)
    mesh.close()
