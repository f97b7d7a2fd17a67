"""An engine as what is saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshwright.checkpoint.errors import CheckpointError
from meshwright.checkpoint.held import masters, optimizer_states, parameters
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.plans import plan_to_json
from meshwright.checkpoint.state import bias_pieces, planned_files, shapes, state_name, total_bytes
from meshwright.checkpoint.subject import Identity, Known, Subject
from meshwright.checkpoint.writer import PlannedFile
from meshwright.comm.views import Held
from meshwright.layout.moves import Piece
from meshwright.parallel.engine import Engine

__all__ = ["EngineSubject", "scale_of", "subject_of"]


def subject_of(held: Engine | Subject) -> Subject:
    return EngineSubject(held) if isinstance(held, Engine) else held


class EngineSubject:
    """Weights in the master type, states of the optimizer, biases of routers, the loss scale."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._plan = engine, engine.plan

    @property
    def identity(self) -> Identity:
        return Identity(self._plan.math, self._plan.layout, self._plan.seed, plan_to_json(self._plan))

    @property
    def known(self) -> Known:
        return shapes(self._plan)

    @property
    def num_bytes(self) -> int:
        return total_bytes(self._plan)

    def planned(self) -> PlannedFile | None:
        return planned_files(self._plan).get(self._engine.mesh.rank)

    def mine(self) -> Sequence[Piece]:
        planned = self.planned()
        return planned.pieces if planned is not None else ()

    def views(self) -> Held:
        held = dict(masters(self._engine))
        for state, views in optimizer_states(self._engine).items():
            held |= {Piece(state_name(state, piece.tensor), piece.rectangle): view for piece, view in views.items()}
        if self._engine.balancer is not None:
            held |= {piece: self._engine.balancer.biases[name] for name, piece in bias_pieces(self._plan).items()}
        return held

    def stale(self) -> Held:
        """At stages 1 and 2 the elements of other ranks' shards."""
        return parameters(self._engine) if self._plan.sharding.stage in (1, 2) else {}

    def updates(self) -> int | None:
        steps = [int(run.step) for store in self._engine.stores for run in store.runs]
        return steps[0] if steps else None

    def extra(self) -> dict[str, Any]:
        scale = self._engine.loss_scale
        return {"loss_scale": {"value": scale.value, "good_steps": scale.good_steps} if scale.dynamic else {}}

    def expect(self, manifest: Manifest) -> None:
        """It has room for everything from the start."""
        scale_of(manifest.extra)

    @torch.no_grad()
    def finish(self, updates: int, extra: Mapping[str, Any]) -> None:
        """Cast masters, count `updates` as completed, take up the loss scale."""
        scale = scale_of(extra)
        if scale is not None and self._engine.loss_scale.dynamic:
            self._engine.loss_scale.value, self._engine.loss_scale.good_steps = scale
        for store in self._engine.stores:
            store.publish_own()
            for run in store.runs:
                run.step.fill_(updates)


def scale_of(extra: Mapping[str, Any]) -> tuple[float, int] | None:
    """The loss scale that a checkpoint keeps, and its good steps; None of a run without. Raises CheckpointError."""
    kept = extra.get("loss_scale")
    if not kept:
        return None
    try:
        return float(kept["value"]), int(kept["good_steps"])
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"the manifest's extra holds loss_scale = {str(kept)[:60]}, which is none") from None
