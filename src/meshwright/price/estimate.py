"""Time and memory of many layouts: the closed forms, block by block so that intermediate arrays stay in cache."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.price.compute import distinct, units
from meshwright.price.layouts import Layouts
from meshwright.price.memory import Memory, memories
from meshwright.price.target import Target
from meshwright.price.times import Times, times
from meshwright.price.weights import weights

_BLOCK = 12288  # layouts at a time: a column of 96 KiB


@dataclass(frozen=True)
class Estimates:
    """One element a layout."""

    times: Times
    memory: Memory


def estimate(target: Target, layouts: Layouts) -> Estimates:
    """Price every layout. Layouts that differ only outside a unit share what a unit costs."""
    few, index = distinct(layouts)
    shared = units(target, few)
    done = Estimates(_empty(Times, len(layouts)), _empty(Memory, len(layouts)))
    for start in range(0, len(layouts), _BLOCK):
        some = slice(start, start + _BLOCK)
        part = layouts.part(some)
        held = weights(target, part)
        _put(done.times, some, times(target, part, shared.take(index[some]), held))
        _put(done.memory, some, memories(target, part, held))
    return done


def _empty(kind: type[Any], size: int) -> Any:
    return kind(**{field.name: np.empty(size) for field in dataclasses.fields(kind)})


def _put(whole: Times | Memory, some: slice, part: Times | Memory) -> None:
    for field in dataclasses.fields(whole):
        getattr(whole, field.name)[some] = getattr(part, field.name)
