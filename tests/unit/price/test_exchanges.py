"""What prices say that a block sends over its context and expert axes is what the program declares, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from meshwright.plan.action import Action, Op, Phase
from meshwright.plan.strategies.calls import unit_calls
from meshwright.price import context, exchanges
from meshwright.price.layouts import of_plan
from meshwright.price.links import Way
from tests.unit.price.ask import ask

MODEL = ("model.preset=llama2-7b", "model.kv_heads=4", "data.sequence_length=4096", "precision.compute=bfloat16",
         "batch.micro=2", "cluster.software.following=literal")  # fmt: skip
ROUTED = ("model.preset=mixtral-8x7b", *MODEL[2:])


def asked(monkeypatch: pytest.MonkeyPatch, words: Sequence[str], gpus: int) -> tuple[set[float], set[int]]:
    """Bytes that links were asked about for a block, and those that its program declares of a forward."""
    price = ask(*words, gpus=gpus)
    plan, found = price.plan, set[float]()

    def note(_: Any, num_bytes: Any, *rest: Any) -> Any:
        found.add(float(np.max(num_bytes)))
        return np.zeros(1)

    for module in (context, exchanges):
        monkeypatch.setattr(module, "exchange_seconds", note)
    monkeypatch.setattr(context, "message_seconds", note)
    monkeypatch.setattr(Way, "gather", note)
    target, layouts = price.target, of_plan(plan)
    assert target.is_literal
    tokens = np.array([plan.batch.micro * plan.data.sequence_length / plan.degrees.cp])
    context.context_seconds(target, layouts, tokens)
    exchanges._experts(target, layouts, tokens)
    action = Action(Op.FORWARD, Phase.FORWARD, 1, 0)
    return found, {call.payload_bytes for call in unit_calls(plan, action)}


@pytest.mark.parametrize(
    ("cp", "how"),
    [
        (4, "context=ring"),
        (4, "context_inner=2"),
        (16, "context_inner=8"),  # more ranks than key/value heads: each has a copy
        (4, "context=allgather"),
        (4, "context=ulysses"),
        (8, "context=ulysses"),
    ],
)
def test_context(monkeypatch: pytest.MonkeyPatch, cp: int, how: str) -> None:
    words = *MODEL, "mesh.dp=1", f"mesh.cp={cp}", f"parallel.{how}", "batch.global=2"
    found, declared = asked(monkeypatch, words, cp)
    assert declared
    assert declared <= found


def test_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    found, declared = asked(monkeypatch, (*ROUTED, "mesh.dp=1", "mesh.ep=4", "batch.global=8"), 4)
    assert len(declared) == 2, "numbers of rows, and rows"
    assert declared <= found
