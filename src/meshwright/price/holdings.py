"""What layouts hold, each once: ranks of one mesh hold the same in whatever order they are numbered."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from meshwright.price.candidates import Group, points_of, trained_bytes
from meshwright.price.layouts import Array
from meshwright.price.legal import Space
from meshwright.price.memory import memories
from meshwright.price.weights import weights

__all__ = ["NEAR", "Holding", "Holdings"]

NEAR = 1.07  # of the device: within that the closed form of the program is of its fold, which decides on what is shown

_Key = tuple[object, ...]


@dataclass(frozen=True)
class Holding:
    """Bytes of every layout: what its allocator reserves, its peak, states that can be elsewhere, and what the program
    of `meshwright train` reserves, 0 where the first does not fit or no such program is asked for."""

    reserved: Array
    peak: Array
    optimizer: Array
    parameters: Array
    trained: Array


@dataclass
class Holdings:
    """Of one search."""

    space: Space
    _known: dict[_Key, Holding] = field(default_factory=dict)

    @property
    def near(self) -> float:
        """Bytes up to which a closed form may say that a layout fits."""
        room = self.space.target.cluster.device.memory_bytes
        return room * (NEAR if self.space.target.is_literal else 1)

    def of(self, group: Group, inside: np.ndarray, outside: np.ndarray, offload: int) -> Holding:
        """Layouts inside x outside of a group."""
        key = group.mesh, id(group.outside), offload, len(inside), hash(inside.tobytes()), hash(outside.tobytes())
        if key not in self._known:
            self._known[key] = self._priced(group, inside, outside, offload)
        return self._known[key]

    def _priced(self, group: Group, inside: np.ndarray, outside: np.ndarray, offload: int) -> Holding:
        points = points_of(self.space, group, inside, outside, offload)
        found = memories(self.space.target, points, weights(self.space.target, points))
        trained = trained_bytes(self.space, points, found.reserved <= self.near)
        return Holding(found.reserved, found.peak, found.optimizer + found.master, found.parameters, trained)
