"""Each unit compiled by itself, whole: a graph break is an error, never a slow path.

Blocks of one shape share their graphs: layers differ in parameters, which are inputs of a graph. Storages that are
released and refilled between calls (ZeRO-3) are the same tensors to it. A program runs compiled units as it runs
others; full recomputation runs a compiled forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn

from meshwright.model.decoder import Head

__all__ = ["compile_units"]


def compile_units(units: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Compile the forward of every unit, of the head its loss; nothing is built before the first call.

    A method is compiled once for all `units`, apart from other calls: graphs hold the names of an engine's groups, and
    the limit of torch (8 graphs a function, a guard against endless recompilation) is one engine's, not the process's.
    """

    @cache
    def compiled(method: Callable[..., Any]) -> Callable[..., Any]:
        alone: dict[str, Any] = {"isolate_recompiles": True}  # which torch's overloads do not know
        out: Callable[..., Any] = torch.compile(method, fullgraph=True, dynamic=False, backend=backend, **alone)
        return out

    for unit in units:
        if isinstance(unit, Head):
            unit.loss = MethodType(compiled(type(unit).loss), unit)  # type: ignore[method-assign]
        else:
            unit.forward = MethodType(compiled(type(unit).forward), unit)
