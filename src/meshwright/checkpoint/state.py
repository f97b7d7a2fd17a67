"""What a checkpoint holds of a plan, and which rank writes it: pure data, the same on every rank.

A tensor is a weight, by its logical name and in the type of the optimizer's copy, or a state of the optimizer, as
"state/name". Frozen weights have no state. Each element is written by its owner, once. Biases of routers
(`model.balance`) are states of another kind: every rank has all of them, and rank 0 writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import torch

from meshwright.checkpoint.writer import PlannedFile, plan_file
from meshwright.layout.moves import Piece, owned
from meshwright.layout.rectangles import full
from meshwright.optim.update import STATE_NAMES
from meshwright.parallel.dtypes import TORCH_DTYPES
from meshwright.plan.norm import bias_names
from meshwright.plan.owners import owners
from meshwright.plan.pieces import layout_of, state_pieces
from meshwright.plan.plan import Plan

__all__ = [
    "bias_pieces", "is_bias", "owned_state", "planned_files", "shapes", "state_name", "total_bytes",
]  # fmt: skip

_BIASES = "router_bias"


def state_name(state: str, tensor: str) -> str:
    """How the checkpoint calls a state of the optimizer."""
    return f"{state}/{tensor}"


@lru_cache(maxsize=32)
def shapes(plan: Plan) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Every tensor of a checkpoint of `plan`, in order of execution, weights first: its shape and type."""
    precision = plan.precision
    weights = {}
    for owner in owners(plan):
        dtype = precision.master if owner.tensor.trainable else precision.compute
        weights[owner.tensor.name] = (owner.tensor.shape, TORCH_DTYPES[dtype])
    states = {
        state_name(state, owner.tensor.name): (owner.tensor.shape, TORCH_DTYPES[precision.master])
        for state in STATE_NAMES[plan.optimizer.kind]
        for owner in owners(plan)
        if owner.tensor.trainable
    }
    biases = {piece.tensor: (piece.rectangle.extent, torch.float32) for piece in bias_pieces(plan).values()}
    return MappingProxyType(weights | states | biases)


def bias_pieces(plan: Plan) -> dict[str, Piece]:
    """The biases of routers by their names in the model, each as a piece of a checkpoint."""
    count = plan.arch.experts.count if plan.arch.experts is not None else 0
    return {name: Piece(state_name(_BIASES, name), full((count,))) for name in bias_names(plan).values()}


def is_bias(name: str) -> bool:
    """Whether a checkpoint calls the bias of a router so."""
    return name.startswith(f"{_BIASES}/")


@lru_cache(maxsize=8)
def owned_state(plan: Plan) -> Mapping[int, tuple[Piece, ...]]:
    """Rank -> the pieces of weights that it writes, each element once over all ranks; states are cut alike."""
    return MappingProxyType(owned(layout_of(plan, state_pieces)))


@lru_cache(maxsize=8)
def planned_files(plan: Plan) -> Mapping[int, PlannedFile]:
    """Rank -> its data file; ranks that own nothing have none."""
    biases = tuple(bias_pieces(plan).values())
    files = {rank: _file(plan, pieces, () if rank else biases) for rank, pieces in owned_state(plan).items() if pieces}
    return MappingProxyType(files)


def total_bytes(plan: Plan) -> int:
    """Bytes of all data files."""
    return sum(file.num_bytes for file in planned_files(plan).values())


def _file(plan: Plan, pieces: tuple[Piece, ...], biases: tuple[Piece, ...]) -> PlannedFile:
    known = shapes(plan)
    weights = [(piece, known[piece.tensor][1]) for piece in pieces]
    states = [
        (Piece(name, piece.rectangle), known[name][1])
        for state in STATE_NAMES[plan.optimizer.kind]
        for piece in pieces
        if (name := state_name(state, piece.tensor)) in known
    ]
    return plan_file([*weights, *states, *((piece, known[piece.tensor][1]) for piece in biases)])
