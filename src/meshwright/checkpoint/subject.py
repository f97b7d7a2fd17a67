"""What is saved and loaded: pieces of logical tensors in a rank's memory, and a few facts beside them.

An engine is one (`engine`), a module under `data_parallel` with its optimizer another (`module`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.writer import PlannedFile
from meshwright.comm.views import Held
from meshwright.layout.moves import Piece

__all__ = ["Identity", "Known", "Subject"]

Known = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Tensors by name, weights first: shape and type. A weight has its own name, a state of it is "state/weight"."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What trains: the hash of what decides the loss curve, that of the layout, and both in full as JSON values."""

    math: str
    layout: str
    seed: int
    plan: Mapping[str, Any]


class Subject(Protocol):
    """One rank's part of it; all ranks ask the same in one order."""

    @property
    def identity(self) -> Identity: ...

    @property
    def known(self) -> Known:
        """All tensors that a checkpoint of it has; at least on rank 0."""

    @property
    def num_bytes(self) -> int:
        """Of all data files, about: what must be free."""

    def planned(self) -> PlannedFile | None:
        """What this rank writes; each element once over all ranks."""

    def mine(self) -> Sequence[Piece]:
        """The pieces of `planned`."""

    def views(self) -> Held:
        """Everything of a checkpoint that this rank has."""

    def stale(self) -> Held:
        """Memory that no write to `views` reaches, and that a checkpoint fills as well."""

    def updates(self) -> int | None:
        """Completed updates of the weights; None on a rank that updates nothing."""

    def extra(self) -> dict[str, Any]:
        """Small state as JSON values."""

    def expect(self, manifest: Manifest) -> None:
        """Make room for what is about to be loaded. Tensors that do not fit are told by `known`; raises CheckpointError
        for `extra` that means nothing."""

    def finish(self, updates: int, extra: Mapping[str, Any]) -> None:
        """After `views` and `stale` were filled."""
