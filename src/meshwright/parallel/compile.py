"""Each unit compiled by itself, whole: a graph break is an error, never a slow path.

Blocks of one shape share their graphs: layers differ in parameters, which are inputs of a graph. Storages that are
released and refilled between calls (ZeRO-3) are the same tensors to it. A program runs compiled units as it runs
others; full recomputation runs a compiled forward again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from meshwright.model.decoder import Head

__all__ = ["compile_units"]


def compile_units(units: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Compile the forward of every unit, of the head its loss; nothing is built before the first call."""
    for unit in units:
        if isinstance(unit, Head):
            unit.loss = torch.compile(unit.loss, fullgraph=True, dynamic=False, backend=backend)  # type: ignore[method-assign]
        else:
            unit.compile(fullgraph=True, dynamic=False, backend=backend)
