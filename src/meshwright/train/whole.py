"""The whole model on one rank, whatever the layout: pieces of parameters moved to where they are wanted."""

from __future__ import annotations

from meshwright.arch.parameters import tensors
from meshwright.checkpoint.held import parameters
from meshwright.comm.exchange import exchange
from meshwright.layout.moves import Piece, moves
from meshwright.layout.rectangles import full
from meshwright.model.decoder import Decoder, build_decoder
from meshwright.parallel.dtypes import TORCH_DTYPES
from meshwright.parallel.engine import Engine
from meshwright.plan.pieces import layout_of

__all__ = ["whole_model"]


def whole_model(engine: Engine, rank: int = 0) -> Decoder | None:
    """The plain model with the engine's values on `rank`, a copy; None on the others. Collective over all ranks."""
    plan = engine.plan
    wanted = {tensor.name: Piece(tensor.name, full(tensor.shape)) for tensor in tensors(plan.arch)}
    listed = moves(layout_of(plan), {rank: tuple(wanted.values())})
    here, held = engine.mesh.rank, parameters(engine)
    if here != rank:
        exchange(listed, here, held, {})
        return None
    model = build_decoder(plan.arch, dtype=TORCH_DTYPES[plan.precision.compute], device=engine.allocator.device)
    target = {wanted[name]: parameter.data for name, parameter in model.named_parameters()}
    exchange(listed, here, held, target)
    return model
