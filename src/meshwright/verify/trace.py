"""What the reference recorded, on disk: every rank reads the rectangles it holds and nothing else.

activation/<unit>          (G, S, D) what leaves the unit in step 0; G sequences in order of sample
gradient/<tensor>          of the summed loss of step 0, before clipping
weight.<k>/<tensor>        after k optimizer steps; 0: start values
figures.json               loss, norm and count of each step, evaluation loss, largest magnitudes
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import Rectangle

__all__ = ["Figures", "Kind", "Quantity", "ReferenceFile", "write_reference"]


class Kind(StrEnum):
    """Kinds of logical tensors that are compared; each has a largest magnitude of its own."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    START = "weight.0"
    FIRST = "weight.1"
    LAST = "weight.5"


@dataclass(frozen=True, slots=True)
class Quantity:
    """One logical tensor of the comparison: a parameter's name, or a unit's for what leaves it."""

    kind: Kind
    name: str

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True)
class Figures:
    """Numbers of the reference. `losses`, `norms` and `counts` have one entry a step; `evaluation` is the mean loss of
    step 0's batch at the start values, without dropout."""

    evaluation: float
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    counts: tuple[int, ...]
    largest: Mapping[str, float]
    """max|b| by `Quantity.key`."""
    shapes: Mapping[str, tuple[int, ...]]
    """By `Quantity.key`."""
    terms: tuple[tuple[float, ...], ...] = ()
    """The auxiliary and the z term of each step; none where routers add none."""

    def largest_of(self, kind: Kind) -> float:
        """M: the largest magnitude over all tensors of a kind."""
        return self._by_kind.get(kind.value, 0.0)

    @cached_property
    def _by_kind(self) -> Mapping[str, float]:
        kinds = {key.partition("/")[0] for key in self.largest}
        return {kind: max(value for key, value in self.largest.items() if key.startswith(f"{kind}/")) for kind in kinds}


def write_reference(folder: Path, tensors: Mapping[Quantity, Tensor], figures: Figures) -> None:
    """Write one reference into a folder of its own."""
    folder.mkdir(parents=True)
    save_file({quantity.key: tensor.contiguous() for quantity, tensor in tensors.items()}, folder / "tensors")
    (folder / "figures.json").write_text(json.dumps(asdict(figures)))


class ReferenceFile:
    """A reference that was written, opened for reading rectangles."""

    def __init__(self, folder: Path) -> None:
        stored: dict[str, Any] = json.loads((folder / "figures.json").read_text())
        self.figures = Figures(
            evaluation=stored["evaluation"],
            losses=tuple(stored["losses"]),
            norms=tuple(stored["norms"]),
            counts=tuple(stored["counts"]),
            largest=stored["largest"],
            shapes={key: tuple(shape) for key, shape in stored["shapes"].items()},
            terms=tuple(tuple(of_step) for of_step in stored["terms"]),
        )
        self._tensors = safe_open(folder / "tensors", framework="pt")

    def read(self, kind: Kind, piece: Piece) -> Tensor:
        """The elements of `piece` (a parameter's, or a unit's activation), of the shape of its rectangle."""
        return self.read_key(f"{kind}/{piece.tensor}", piece.rectangle)

    def read_key(self, key: str, rectangle: Rectangle) -> Tensor:
        """The elements of a rectangle of the tensor called `key`."""
        spans = zip(rectangle.start, rectangle.stop, strict=True)
        whole = self._tensors.get_slice(key)  # type: ignore[no-untyped-call]  # safetensors has no types here
        out: Tensor = whole[tuple(slice(*span) for span in spans)]
        return out
