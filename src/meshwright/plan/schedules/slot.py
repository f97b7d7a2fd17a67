"""A slot: one line of a pipeline schedule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Work(Enum):
    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"  # the weight products that a split backward left


@dataclass(frozen=True, slots=True)
class Slot:
    """One micro-batch through one chunk of a stage. `split`: a backward of inputs only, its weights come later."""

    work: Work
    chunk: int
    micro: int
    split: bool = False
