"""A module under `data_parallel`, with its optimizer, as what is saved and loaded.

A rank owns a flat run of elements of each bucket, and of each parameter in it what lies in that run: a few rectangles.
Frozen parameters have a bucket of their own and are cut like others; no optimizer knows them, so they have no state.

    bucket    | weight ............ | bias |  pad  |        weight (3, 4), cut in the middle of a row
    rank 0    | 0 1 2 3 4 5                                  rows 0; row 1, columns 0 and 1
    rank 1                6 7 8 9 10 11     bias             row 1, columns 2 and 3; row 2
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.state import state_name
from meshwright.checkpoint.subject import Identity, Known
from meshwright.checkpoint.writer import PlannedFile, plan_file
from meshwright.comm.views import Held
from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import flat_rectangles
from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.flat import FlatBucket, Slot

__all__ = ["ModuleSubject"]

_COUNTS = "step"
"""How torch's optimizers call the number of updates, kept beside each parameter's states."""


class ModuleSubject:
    """Weights in their own type, and every state of the optimizer that is shaped like its parameter."""

    def __init__(self, parallel: DataParallel, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._parallel, self._optimizer = parallel, optimizer
        self._expected: dict[str, dict[str, torch.dtype]] = {}
        """Weight -> the states that a checkpoint has of it: a rank that owns none of it makes none."""

    @property
    def identity(self) -> Identity:
        shape = [
            [slot.name, list(slot.shape), str(slot.parameter.dtype), bucket.trainable] for bucket, slot in self._slots()
        ]
        degrees = {axis: self._parallel.ranks if axis == "dp" else 1 for axis in ("dp", "tp", "pp", "cp", "ep")}
        plan = {"module": shape, "degrees": degrees, "sharding": {"stage": self._parallel.stage}}
        return Identity(_digest(sorted(shape)), _digest([degrees, self._parallel.stage]), 0, plan)

    @property
    def known(self) -> Known:
        weights = {slot.name: (tuple(slot.shape), slot.parameter.dtype) for _, slot in self._slots()}
        states = {
            state_name(key, slot.name): (tuple(slot.shape), dtype)
            for bucket, slot in self._slots()
            for key, dtype in self._kinds(bucket).items()
        }
        return weights | states

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.known.values())

    def planned(self) -> PlannedFile | None:
        known, mine = self.known, self.mine()
        return plan_file([(piece, known[piece.tensor][1]) for piece in mine]) if mine else None

    def mine(self) -> Sequence[Piece]:
        return [
            Piece(name, rectangle)
            for bucket, slot in self._slots()
            for name in (slot.name, *(state_name(key, slot.name) for key in self._kinds(bucket)))
            for rectangle, _ in _rectangles(slot, *bucket.counted)
        ]

    def views(self) -> Held:
        held: dict[Piece, Tensor] = {}
        for bucket, slot in self._slots():
            sharded = bucket.stage == 3
            flat, first, last = (bucket.kept, bucket.first, bucket.last) if sharded else (bucket.whole, 0, bucket.numel)
            for rectangle, place in _rectangles(slot, first, last):
                low = slot.offset + place - first
                held[Piece(slot.name, rectangle)] = flat[low : low + rectangle.numel].detach().view(rectangle.extent)
            for key, state in self._states(bucket, slot):
                begin = max(bucket.first - slot.offset, 0)
                for rectangle, place in _rectangles(slot, bucket.first, bucket.last):
                    part = state.detach().reshape(-1)[place - begin : place - begin + rectangle.numel]
                    held[Piece(state_name(key, slot.name), rectangle)] = part.view(rectangle.extent)
        return held

    def stale(self) -> Held:
        return {}

    def updates(self) -> int | None:
        if self._optimizer is None:
            return None
        steps = [int(state[_COUNTS]) for state in self._optimizer.state.values() if _COUNTS in state]
        return max(steps, default=None)

    def extra(self) -> dict[str, Any]:
        return {"counts_updates": self.updates() is not None}

    def expect(self, manifest: Manifest) -> None:
        """States as the checkpoint has them: torch's optimizers make theirs in their first step."""
        for each in manifest.tensors if self._optimizer is not None else ():
            key, _, weight = each.name.partition("/")
            if weight:
                self._expected.setdefault(weight, {})[key] = each.dtype
        for weight, piece in self._pieces():
            for key, dtype in self._expected.get(weight, {}).items():
                self._state_of(piece).setdefault(key, torch.zeros_like(piece, dtype=dtype))

    def finish(self, updates: int, extra: Mapping[str, Any]) -> None:
        if self._optimizer is None or not extra.get("counts_updates"):
            return
        for group in self._optimizer.param_groups:
            on_device = group.get("fused") or group.get("capturable")
            for piece in group["params"]:
                if piece.numel():
                    device = piece.device if on_device else torch.device("cpu")
                    self._state_of(piece)[_COUNTS] = torch.tensor(float(updates), device=device)

    # ------------------------------------------------------------------ inside

    def _slots(self) -> Iterator[tuple[FlatBucket, Slot]]:
        for bucket in self._parallel.buckets():
            for slot in bucket.slots:
                yield bucket, slot

    def _pieces(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer updates."""
        return (pair for bucket in self._parallel.buckets() for pair in bucket.pieces.items())

    def _state_of(self, piece: nn.Parameter) -> dict[str, Any]:
        assert self._optimizer is not None
        state: dict[str, Any] = self._optimizer.state[piece]
        return state

    def _states(self, bucket: FlatBucket, slot: Slot) -> Iterator[tuple[str, Tensor]]:
        piece = bucket.pieces.get(slot.name)
        if piece is None or self._optimizer is None:
            return
        for key, value in self._optimizer.state.get(piece, {}).items():
            if isinstance(value, Tensor) and value.shape == piece.shape and key != _COUNTS:
                yield key, value

    def _kinds(self, bucket: FlatBucket) -> dict[str, torch.dtype]:
        """States of the tensors of a bucket, by name. Rank 0 owns the first elements of each: it has them all."""
        kinds = {key: value.dtype for slot in bucket.slots for key, value in self._states(bucket, slot)}
        for slot in bucket.slots:
            kinds |= self._expected.get(slot.name, {})
        return kinds


def _rectangles(slot: Slot, first: int, last: int) -> list[tuple[Any, int]]:
    """What elements [first, last) of a bucket hold of a parameter, each with its flat offset in the parameter."""
    low, high = max(slot.offset, first) - slot.offset, min(slot.stop, last) - slot.offset
    return list(flat_rectangles(tuple(slot.shape), low, high)) if low < high else []


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
