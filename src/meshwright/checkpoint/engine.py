"""The state of an engine as views of checkpoint tensors, and what must follow when they were written to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from meshwright.checkpoint.held import masters, optimizer_states, parameters
from meshwright.checkpoint.state import state_name
from meshwright.checkpoint.views import Held
from meshwright.layout.moves import Piece
from meshwright.parallel.engine import Engine

__all__ = ["completed_updates", "finish_load", "scale_of", "stale_parameters", "state_views"]


def state_views(engine: Engine) -> Held:
    """Everything that a checkpoint holds and this rank has: weights in the master type, states of the optimizer."""
    held = dict(masters(engine))
    for state, views in optimizer_states(engine).items():
        held |= {Piece(state_name(state, piece.tensor), piece.rectangle): view for piece, view in views.items()}
    return held


def stale_parameters(engine: Engine) -> Held:
    """Parameters that no write to `state_views` reaches: at stages 1 and 2 the elements of other ranks' shards."""
    return parameters(engine) if engine.plan.sharding.stage in (1, 2) else {}


@torch.no_grad()
def finish_load(engine: Engine, updates: int, scale: Mapping[str, Any] | None = None) -> None:
    """After `state_views` and `stale_parameters` were filled: cast masters, count `updates` as completed, and take up
    the loss scale that `scale_of` told."""
    if scale and engine.loss_scale.dynamic:
        engine.loss_scale.value = float(scale["value"])
        engine.loss_scale.good_steps = int(scale["good_steps"])
    for store in engine.stores:
        store.publish_own()
        for run in store.runs:
            run.step.fill_(updates)


def scale_of(engine: Engine) -> dict[str, Any]:
    """The loss scale of a run in float16, as JSON values; nothing where there is none."""
    scale = engine.loss_scale
    return {"value": scale.value, "good_steps": scale.good_steps} if scale.dynamic else {}


def completed_updates(engine: Engine) -> int | None:
    """Updates of the weights so far; None on a rank that updates nothing."""
    steps = [int(run.step) for store in engine.stores for run in store.runs]
    return steps[0] if steps else None
