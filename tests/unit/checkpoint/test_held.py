"""Views of an engine's memory: they are the engine's own elements, at the place the plan says."""

from dataclasses import replace

import torch

from meshwright.arch.parameters import tensors
from meshwright.checkpoint.held import gradients, masters, optimizer_states, parameters
from meshwright.comm.mesh import Mesh
from meshwright.config.choices import Dtype
from meshwright.parallel.engine import Engine
from meshwright.plan.action import Action, Op
from meshwright.plan.plan import Optimizer, Precision
from meshwright.verify.batches import global_batches
from tests.unit.plan.plans import make_plan

PLAN = replace(make_plan(micro=4, arch={"tie_embeddings": True}), optimizer=Optimizer(clip_norm=0.0))


def test_parameters_are_the_models_own_memory() -> None:
    engine = Engine(PLAN, Mesh.of(PLAN).start())
    held = parameters(engine)
    assert {piece.tensor for piece in held} == {tensor.name for tensor in tensors(PLAN.arch)}
    for piece, view in held.items():
        parameter = engine.model.get_parameter(piece.tensor)
        assert torch.equal(view, parameter)
        view[0] = 7.0
        assert bool((parameter[0] == 7.0).all())


def test_gradients_before_the_update_and_adamws_first_moments_after_it() -> None:
    engine = Engine(PLAN, Mesh.of(PLAN).start())
    kept: dict[str, torch.Tensor] = {}

    def look(action: Action) -> None:
        if action.op is Op.UPDATE and not kept:
            kept.update({piece.tensor: view.clone() for piece, view in gradients(engine).items()})

    engine.observe(look)
    engine.step(global_batches(PLAN, 1)[0], 1e-3)
    states = optimizer_states(engine)
    assert list(states) == ["exp_avg", "exp_avg_sq"]
    assert len(states["exp_avg"]) == len(states["exp_avg_sq"]) == len(kept) == len(tensors(PLAN.arch))
    for piece, view in states["exp_avg"].items():
        assert torch.allclose(view, (1 - 0.9) * kept[piece.tensor], rtol=1e-6, atol=0)
        assert torch.allclose(states["exp_avg_sq"][piece], 0.05 * kept[piece.tensor] ** 2, rtol=1e-5, atol=0)


def test_masters_are_wider_copies_where_there_are_copies() -> None:
    plan = replace(PLAN, precision=Precision(Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.FLOAT32))
    engine = Engine(plan, Mesh.of(plan).start())
    wide, narrow = masters(engine), parameters(engine)
    assert wide.keys() == narrow.keys()
    for piece, view in wide.items():
        assert view.dtype is torch.float32
        assert torch.equal(view.bfloat16(), narrow[piece])
