"""A batch of another shape than the plan's step is refused: it was cut otherwise, and trained without a word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.comm.mesh import Mesh
from meshwright.parallel.engine import Engine
from meshwright.verify.batches import global_batches
from tests.unit.plan.plans import make_plan


@pytest.mark.parametrize("change", ["sequences", "tokens"])
def test_only_the_shape_of_the_plan_is_taken(change: str) -> None:
    plan = make_plan(micro=2, accumulation=2)
    engine = Engine(plan, Mesh())
    other = replace(plan, batch=replace(plan.batch, sequences=8))
    if change == "tokens":
        other = replace(plan, data=replace(plan.data, sequence_length=16))
    (batch,), (right,) = global_batches(other, 1), global_batches(plan, 1)
    told = f"a share of {'8 x 32' if change == 'sequences' else '4 x 16'} tokens: a rank's step takes 4 sequences of 32"
    for run in (lambda: engine.step(batch, 0.1), lambda: engine.evaluate(batch)):
        with pytest.raises(ValueError, match=told):
            run()
    assert engine.step(engine.share(right), 0.1).finite
