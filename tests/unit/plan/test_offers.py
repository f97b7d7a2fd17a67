"""Whatever a refusal offers works: each offer, taken up alone, as a run file would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.arch.arch import Experts
from meshwright.config.choices import Context
from meshwright.config.errors import RequestError
from meshwright.plan.plan import ContextSplit, Plan
from meshwright.plan.rules import canonical, check_plan
from tests.unit.plan.plans import make_plan

RING, ULYSSES = ContextSplit(), ContextSplit(Context.ULYSSES)


def taken(plan: Plan, offer: str) -> Plan:
    """`plan` with what a refusal offers: "key = value", or several of these joined by "with"."""
    for part in offer.split(" with "):
        key, value = part.split(" = ")
        match key.split("."):
            case ["mesh", axis]:
                plan = replace(plan, degrees=replace(plan.degrees, **{axis: int(value)}))
            case ["batch", "global"]:
                plan = replace(plan, batch=replace(plan.batch, sequences=int(value)))
            case ["batch", "micro"]:
                plan = replace(plan, batch=replace(plan.batch, micro=int(value)))
            case ["parallel", "context"]:
                plan = replace(plan, context=replace(plan.context, kind=Context(value.strip('"'))))
            case ["parallel", "context_inner"]:
                plan = replace(plan, context=replace(plan.context, inner=int(value)))
            case _:
                raise AssertionError(f"no test takes up {offer}")
    return plan


def check_offers(plan: Plan) -> tuple[str, ...]:
    with pytest.raises(RequestError) as refused:
        check_plan(canonical(plan))
    offers = refused.value.nearest
    assert offers
    for offer in offers:
        check_plan(canonical(taken(plan, offer)))
    return offers


CONTEXTS = {
    "halves": (RING, 32, 32, {}),
    "length of a ring": (RING, 31, 32, {}),
    "inner group": (ContextSplit(Context.RING, 3), 8, 32, {}),
    "heads of an inner group": (ContextSplit(Context.RING, 4), 8, 32, {"heads": 6, "kv_heads": 3}),
    "heads": (ULYSSES, 8, 32, {}),
    "key heads": (ULYSSES, 2, 32, {"heads": 6, "kv_heads": 3}),
    "one token": (RING, 2, 2, {}),
}


@pytest.mark.parametrize("case", CONTEXTS)
def test_context_splits(case: str) -> None:
    split, cp, length, arch = CONTEXTS[case]
    plan = make_plan(cp=cp, arch=arch)
    check_offers(replace(plan, context=split, data=replace(plan.data, sequence_length=length)))


@pytest.mark.parametrize(
    ("sequences", "micro", "mesh", "offered"),
    [
        (8, 2, {"dp": 3, "ep": 2}, {"mesh.dp = 2", "mesh.dp = 1"}),
        (8, 2, {"dp": 2, "ep": 6}, {"mesh.ep = 1", "mesh.ep = 2"}),
        (8, 4, {"dp": 4, "ep": 2}, {"batch.micro = 1"}),
        (9, 2, {"dp": 3}, {"batch.micro = 1", "batch.micro = 3"}),
        (8, 2, {"dp": 3}, {"mesh.dp = 2", "mesh.dp = 4"}),
    ],
)
def test_batches(sequences: int, micro: int, mesh: dict[str, Any], offered: set[str]) -> None:
    plan = make_plan(**mesh, arch={"experts": Experts(6, 2, 32)})
    plan = replace(plan, batch=replace(plan.batch, sequences=sequences, micro=micro))
    assert offered <= set(check_offers(plan))
