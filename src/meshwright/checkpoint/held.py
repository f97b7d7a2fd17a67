"""What a rank's engine holds, as views of the pieces of logical tensors: the ends of every move from or to a rank.

Nothing is copied: writing to a view writes to the engine's memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.comm.views import Held
from meshwright.layout.moves import Piece
from meshwright.optim.update import STATE_NAMES
from meshwright.parallel.engine import Engine
from meshwright.parallel.store import Store
from meshwright.plan.pieces import Placed, parameter_pieces, state_pieces

__all__ = ["gradients", "masters", "optimizer_states", "parameters", "published"]


def parameters(engine: Engine) -> Held:
    """The parameters between steps, in the compute dtype: whole segments, or this rank's shards under ZeRO-3."""
    held = parameter_pieces(engine.plan, engine.mesh.rank)
    return _views(engine, held, lambda store: store.whole if store.shard is None else store.shard)


def masters(engine: Engine) -> Held:
    """The values that the optimizer updates, in the master dtype."""
    return _views(engine, state_pieces(engine.plan, engine.mesh.rank), lambda store: store.master)


def published(engine: Engine) -> Held:
    """The same elements as `masters`, of trained tensors, in the compute dtype: what forwards read."""
    return _views(engine, _trained(engine), Store.own_parameters)


def gradients(engine: Engine) -> Held:
    """The summed gradients, in the reduction dtype; only between the last sum of a step and its first update."""
    return _views(engine, _trained(engine), lambda store: store.reduced)


def optimizer_states(engine: Engine) -> dict[str, Held]:
    """Each state tensor of the optimizer ("exp_avg", ..) by piece; where a run of elements ends, so does a piece."""
    held = state_pieces(engine.plan, engine.mesh.rank)
    out: dict[str, Held] = {}
    for number, name in enumerate(STATE_NAMES[engine.plan.optimizer.kind]):
        states: dict[Piece, Tensor] = {}
        for placed in held:
            offset = 0
            for run in engine.stores[placed.bucket].runs:
                if offset <= placed.offset < offset + run.values.numel():
                    states[placed.piece] = _view(run.state[number], placed, offset)
                offset += run.values.numel()
        out[name] = states
    return out


def _trained(engine: Engine) -> tuple[Placed, ...]:
    held = state_pieces(engine.plan, engine.mesh.rank)
    return tuple(placed for placed in held if engine.stores[placed.bucket].bucket.trainable)


def _views(engine: Engine, held: tuple[Placed, ...], flat: Callable[[Store], Tensor]) -> Held:
    return {placed.piece: _view(flat(engine.stores[placed.bucket]), placed, 0) for placed in held}


def _view(flat: Tensor, placed: Placed, first: int) -> Tensor:
    """The view of a piece in memory whose element 0 is element `first` of what `placed.offset` counts in."""
    where = flat.storage_offset() + placed.offset - first
    return torch.as_strided(flat.detach(), placed.piece.rectangle.extent, placed.strides, where)
