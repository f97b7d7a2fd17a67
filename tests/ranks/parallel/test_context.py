"""Context parallelism equals one process, to the last digits of float64, and sends what is declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from meshwright.arch.arch import Arch
from meshwright.config.choices import Context, Documents, Offload, Recompute, Schedule
from meshwright.data.batch import IGNORED, Batch
from meshwright.layout.axes import Degrees
from meshwright.layout.rows import whole_rows
from meshwright.model.decoder import Block
from meshwright.model.rows import Rows
from meshwright.parallel.engine import Engine
from meshwright.plan import plan as plans
from meshwright.plan.folds.ledger import ledger
from meshwright.plan.plan import ContextSplit, Data, Execution, Pipeline, Plan, Sharding, Start
from meshwright.plan.rules import canonical, check_plan
from meshwright.plan.stages import balanced
from meshwright.testing.ranks import run_cases
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.logical import check_one_process, shared_mesh, to_first, train
from tests.ranks.parallel.plain import ADAMW, DOUBLE
from tests.ranks.parallel.test_tensor import FAMILIES

LENGTH = 16
RING, GATHER, ULYSSES = ContextSplit(), ContextSplit(Context.ALLGATHER), ContextSplit(Context.ULYSSES)
INNER = ContextSplit(Context.RING, 2)
NONE, SELECTIVE, FULL = Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL


@dataclass(frozen=True)
class Case:
    """A layout of a small model whose vocabulary of 101 nothing divides; documents are cut at random places."""

    context: ContextSplit = RING
    cp: int = 2
    masked: bool = False
    family: str = "llama"
    dp: int = 1
    tp: int = 1
    pp: int = 1
    layers: int = 2
    kv_heads: int = 4
    zero: int = 0
    within: int = 0
    accumulation: int = 1
    schedule: Schedule = Schedule.ONE_F_ONE_B
    chunks: int = 1
    sequence: bool = False
    chunked: bool = False
    recompute: Recompute = NONE
    offload: Offload = Offload.NONE
    compile: bool = False
    dropout: float = 0.0

    @property
    def name(self) -> str:
        changed = {key: getattr(self, key) for key in self.__dataclass_fields__}
        return ", ".join(f"{key} {value}" for key, value in changed.items() if value != getattr(Case(), key))

    @property
    def plan(self) -> Plan:
        sizes = {"hidden": 24, "heads": 4, "kv_heads": self.kv_heads, "head_dim": 6, "ffn": 48, "vocab": 101}
        plan = Plan(
            name="tiny",
            seed=0,
            arch=Arch(self.family, layers=self.layers, dropout=self.dropout, **sizes, **FAMILIES[self.family]),
            start=Start(),
            data=Data(sequence_length=LENGTH, documents=Documents.MASKED if self.masked else Documents.PACKED),
            batch=plans.Batch(16, 16 // (self.dp * self.accumulation)),
            optimizer=ADAMW,
            precision=DOUBLE,
            degrees=Degrees(dp=self.dp, tp=self.tp, pp=self.pp, cp=self.cp),
            sharding=Sharding(self.zero, self.within),
            pipeline=Pipeline(self.schedule, self.chunks, balanced([1.0] * self.layers, 0, 0, self.pp * self.chunks)),
            context=self.context,
            execution=Execution(
                recompute=self.recompute, offload=self.offload, compile=self.compile, sequence=self.sequence,
                asynchronous_tensor=self.chunked,
            ),
        )  # fmt: skip
        plan = canonical(plan)
        check_plan(plan)
        return plan


def equals_one_process(rank: int, case: Case) -> None:
    plan = case.plan
    ran = train(Engine(plan, shared_mesh(plan)))
    check_one_process(ran, plan)
    predicted = set(ledger(plan, rank))
    assert all(set(rows) == predicted for rows in ran.rows), predicted ^ set(ran.rows[0])


def alone(context: ContextSplit) -> Sequence[Case]:
    four = Case(context, cp=4)
    return (
        four,
        replace(four, masked=True, kv_heads=2),
        replace(four, masked=True, family="mistral", dropout=0.1),
        replace(four, family="gpt2", zero=1, recompute=SELECTIVE, offload=Offload.OPTIMIZER),
        replace(four, family="qwen3", zero=3, recompute=FULL, masked=True),
        replace(four, zero=2, within=2, recompute=SELECTIVE, accumulation=2, masked=True),
    )


def beside_replicas(context: ContextSplit) -> Sequence[Case]:
    two = Case(context, dp=2)
    return (
        replace(two, zero=3, masked=True),
        replace(two, zero=2, within=2, family="qwen3"),
        replace(two, zero=3, within=2, offload=Offload.PARAMS, recompute=SELECTIVE),
    )


def beside_tensor_ranks(context: ContextSplit) -> Sequence[Case]:
    two = Case(context, tp=2)
    return (
        replace(two, masked=True, kv_heads=1),
        replace(two, family="gpt2", recompute=FULL),
        replace(two, sequence=True, masked=True, dropout=0.1, family="mistral"),
        replace(two, sequence=True, chunked=True, family="qwen3", recompute=SELECTIVE),
    )


def beside_stages(context: ContextSplit) -> Sequence[Case]:
    two, four = Case(context, pp=2, accumulation=4), Case(context, pp=2, accumulation=4, layers=4, chunks=2)
    return (
        replace(two, family="gpt2"),
        replace(two, schedule=Schedule.GPIPE, masked=True, zero=1),
        replace(two, schedule=Schedule.NAIVE, zero=3, recompute=SELECTIVE),
        replace(two, schedule=Schedule.ZB_H1, dropout=0.1, family="mistral", masked=True),
        replace(four, schedule=Schedule.INTERLEAVED, recompute=FULL),
        replace(four, schedule=Schedule.ZB_V, zero=2, masked=True),
    )


def some() -> Sequence[Case]:
    """Each kind, with what the pairwise cover of `verify` has not: four ranks, windows, groups, ledgers."""
    return (
        alone(RING)[1], alone(INNER)[2], alone(INNER)[4], alone(GATHER)[3], alone(ULYSSES)[1],
        beside_replicas(RING)[2], beside_replicas(GATHER)[1],
        beside_tensor_ranks(RING)[2], beside_tensor_ranks(ULYSSES)[0], beside_stages(RING)[3],
    )  # fmt: skip


@pytest.mark.timeout(120)
def test_equals_one_process() -> None:
    run_cases(equals_one_process, 4, some(), timeout=110)


@pytest.mark.prove
@pytest.mark.timeout(300)
@pytest.mark.parametrize("context", [RING, INNER, GATHER, ULYSSES], ids=["ring", "inner", "gather", "ulysses"])
def test_equals_one_process_on_all_layouts(context: ContextSplit) -> None:
    cases = [*alone(context)]
    if context is not INNER:
        cases += [*beside_replicas(context), *beside_tensor_ranks(context), *beside_stages(context)]
    run_cases(equals_one_process, 4, cases, timeout=290)


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_equals_one_process_on_three_axes() -> None:
    """Eight ranks: rings of groups beside each axis, and each kind beside two."""
    cases = [
        Case(INNER, cp=4, dp=2, zero=3, within=4, masked=True, recompute=SELECTIVE),
        Case(INNER, cp=4, tp=2, sequence=True, family="qwen3", kv_heads=2, masked=True),
        Case(INNER, cp=4, pp=2, accumulation=4, schedule=Schedule.ZB_H1, family="mistral"),
        Case(RING, cp=8, masked=True),
        Case(RING, tp=2, pp=2, accumulation=4, schedule=Schedule.ZB_H1, masked=True, sequence=True),
        Case(GATHER, dp=2, pp=2, accumulation=4, zero=2, recompute=FULL),
        Case(ULYSSES, dp=2, tp=2, zero=3, masked=True, sequence=True, chunked=True),
    ]
    run_cases(equals_one_process, 8, cases, timeout=290)


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_compiled_units_equal_one_process() -> None:
    cases = [
        Case(RING, compile=True, masked=True),
        Case(GATHER, compile=True, family="mistral"),
        Case(ULYSSES, compile=True, masked=True, kv_heads=1),
    ]
    run_cases(equals_one_process, 2, cases, timeout=290)


# ------------------------------------------------------------------ what a cut may not change


def last_block(plan: Plan, batch: Batch) -> dict[int, Tensor]:
    """Token of the sequence -> what leaves the last block here."""
    engine = Engine(plan, shared_mesh(plan))
    taken: dict[int, Tensor] = {}

    def look(_: Any, inputs: tuple[Any, ...], out: Tensor) -> None:
        rows = inputs[1]
        assert isinstance(rows, Rows)
        taken.update(zip(rows.offsets.flatten().tolist(), out.detach().clone(), strict=True))

    block = engine.model.layers[-1]
    assert isinstance(block, Block)
    handle = block.register_forward_hook(look)
    engine.evaluate(batch)
    handle.remove()
    return taken


def moved_by_token_0(rank: int, context: ContextSplit) -> dict[int, float]:
    """Token of the sequence, of those held here -> how far it moves when token 0 is another one."""
    plan = replace(Case(context, masked=True).plan, batch=plans.Batch(1, 1))
    ids = np.repeat(np.arange(2), (5, 11))[None]
    tokens = np.arange(LENGTH)[None] % 101
    labels, moved = np.full_like(tokens, 7), tokens.copy()
    moved[0, 0] = 99
    before, after = (
        last_block(plan, Batch(each, labels, whole_rows(0, np.zeros(1, dtype=np.int64), LENGTH, ids)))
        for each in (tokens, moved)
    )
    return {token: float((after[token] - before[token]).abs().max()) for token in before}


def test_a_document_moves_the_next_by_exactly_nothing() -> None:
    """B39 (huggingface/trl#6843): documents of 5 and 11 tokens on two ranks, which no cut is aligned with."""
    kinds = [RING, GATHER, ULYSSES]
    for kind, ranks in zip(kinds, zip(*run_cases(moved_by_token_0, 2, kinds, timeout=60), strict=True), strict=True):
        away = {token: size for of_rank in ranks for token, size in of_rank.items()}
        assert sorted(away) == list(range(LENGTH)), kind
        assert all((size > 0) is (token < 5) for token, size in away.items()), f"{kind}: {away}"


def few_labels(rank: int, plan: Plan) -> None:
    """Only the first token of the batch is trained, or none: ranks without a label add nothing, and no NaN."""
    (batch,) = global_batches(plan, 1)
    for kept in (1, 0):
        labels = np.full_like(batch.labels, IGNORED)
        labels[0, :kept] = batch.labels[0, :kept]
        one = Batch(batch.inputs, labels, batch.rows)
        engine = Engine(plan, shared_mesh(plan))
        result = engine.step(local_share(plan, one, rank), 0.0)
        assert result.trained_tokens == kept
        assert result.finite
        assert (result.loss > 0, result.grad_norm > 0) == (bool(kept), bool(kept))
        alike = to_first((result.loss, result.grad_norm))
        assert all(each == alike[0] for each in alike)


def test_ranks_without_a_label_add_nothing() -> None:
    """B02 (allenai/OLMo-core#657): of two context ranks one holds no trained token."""
    run_cases(few_labels, 2, [Case(kind).plan for kind in (RING, ULYSSES)], timeout=60)


def padded(rank: int, plan: Plan) -> tuple[float, int]:
    """An evaluation whose last sequences only fill the batch: (sum of the losses, trained tokens) of all ranks."""
    (batch,) = global_batches(plan, 1)
    ids = np.where(np.arange(16) < 11, batch.rows.sample_ids, -1)
    labels = np.where(ids[:, None] < 0, IGNORED, batch.labels)
    rows = whole_rows(0, ids, LENGTH, batch.rows.document_ids)
    engine = Engine(plan, shared_mesh(plan))
    evaluated = engine.evaluate(local_share(plan, Batch(batch.inputs, labels, rows), rank))
    return evaluated.loss_sum, evaluated.trained_tokens


def test_padding_is_seen_by_nobody() -> None:
    """Sequences of nothing, whose tokens see themselves alone, beside real ones on the same rank."""
    cases = [Case(kind, masked=masked).plan for kind in (RING, GATHER, ULYSSES) for masked in (False, True)]
    wanted = [padded(0, Case(cp=1, masked=masked).plan) for masked in (False, True)]
    for of_rank in run_cases(padded, 2, cases, timeout=60):
        for number, (loss, count) in enumerate(of_rank):
            assert loss == pytest.approx(wanted[number % 2][0], rel=1e-13)
            assert count == wanted[number % 2][1]
