"""What a command is not asked to change stays, whatever layout a checkpoint has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.checkpoint.relayout import on_layout
from tests.ranks.checkpoint.layouts import LAYOUTS, Layout


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_keys_that_are_not_given_stay(layout: Layout) -> None:
    """Tensor ranks without sequence parallel were given it."""
    assert on_layout(layout.plan, []) == layout.plan


def test_uneven_stages_stay_while_there_are_as_many() -> None:
    plan = next(layout.plan for layout in LAYOUTS if len(layout.plan.pipeline.stages) == 2)
    layers = plan.arch.layers
    uneven = replace(plan, pipeline=replace(plan.pipeline, stages=(layers - 1, 1)))
    assert on_layout(uneven, []).pipeline.stages == (layers - 1, 1)
    assert on_layout(uneven, ["mesh.dp=2", "mesh.pp=1"]).pipeline.stages == (layers,)
    assert sum(on_layout(uneven, ["parallel.stages=balanced"]).pipeline.stages) == layers
