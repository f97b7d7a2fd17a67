"""A run in float16 goes on with the loss scale that it had."""

from dataclasses import replace
from pathlib import Path

import torch

from meshwright.checkpoint.held import parameters
from meshwright.checkpoint.loader import load
from meshwright.comm.agree import Side
from meshwright.comm.mesh import Mesh
from meshwright.config.choices import Dtype
from meshwright.parallel.engine import Engine
from meshwright.plan.plan import Precision
from tests.unit.checkpoint.saved import plan_of, save, scramble, values_of


def test_the_loss_scale_comes_back(tmp_path: Path) -> None:
    plan = replace(plan_of(), precision=Precision(Dtype.FLOAT16, Dtype.FLOAT32, Dtype.FLOAT32))
    engine, other = (Engine(plan, Mesh(1).start()) for _ in range(2))
    assert engine.loss_scale.dynamic
    fresh = (other.loss_scale.value, other.loss_scale.good_steps)
    engine.loss_scale.value, engine.loss_scale.good_steps = 512.0, 7
    folder = save(engine, tmp_path)
    scramble(other)
    load(other, folder, Side())
    assert (other.loss_scale.value, other.loss_scale.good_steps) == (512.0, 7) != fresh
    before, after = values_of(engine), values_of(other)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for one, two in zip(parameters(engine).values(), parameters(other).values(), strict=True):
        assert one.dtype is torch.float16
        assert torch.equal(one, two)
