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

_BLOCK = 8192  # layouts at a time: a column of 64 KiB


@dataclass(frozen=True)
class Estimates:
    """One element a layout."""

    times: Times
    memory: Memory


def estimate(target: Target, layouts: Layouts) -> Estimates:
    """Price every layout. Layouts that differ only outside a unit share what a unit costs."""
    few, index = distinct(layouts)
    shared = units(target, few)
    done = []
    for start in range(0, len(layouts), _BLOCK):
        some = slice(start, start + _BLOCK)
        part = layouts.part(some)
        held = weights(target, part)
        done.append(Estimates(times(target, part, shared.take(index[some]), held), memories(target, part, held)))
    if len(done) == 1:
        return done[0]
    return Estimates(_joined(Times, [each.times for each in done]), _joined(Memory, [each.memory for each in done]))


def _joined(kind: type[Any], parts: list[Any]) -> Any:
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})
