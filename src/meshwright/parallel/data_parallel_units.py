"""What `data_parallel` gathers and reduces together: the units of any module, and the buckets of each.

A unit is a member of a list or sequence of modules (blocks); everything else, and every parameter that several units
use, belongs to the root, which is whole from the module's forward to the end of its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from meshwright.parallel.flat import FlatBucket
from meshwright.plan.action import Phase

__all__ = ["Named", "Unit", "build_units", "find_blocks"]

Named = list[tuple[str, nn.Parameter]]


class Unit:
    """The buckets of one unit, and how far its backward is.

    `missing` trained parameters have no gradient yet in this backward; `passed_on`: what entered the unit has its
    gradient. Once both are done, no operation of the unit's backward is left that could read a parameter: each leads
    to a trained parameter or to what entered. Where some parameters are not used, `missing` stays above 0; then
    `computed` tells that those in the graph have their gradients. A checkpoint inside of the unit has a graph of its
    own, so that counts only once backward has come to the unit before.
    """

    def __init__(self, buckets: list[FlatBucket]) -> None:
        self.buckets = buckets
        self.trained = [bucket for bucket in buckets if bucket.trainable]
        self.missing = self.num_trained = sum(len(bucket.slots) for bucket in self.trained)
        self.all_trained = len(self.trained) == len(buckets)
        self.passed_on = True
        self.computed = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [slot.parameter for bucket in self.trained for slot in bucket.slots]

    @property
    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)

    def begin_gather(self, phase: Phase) -> None:
        for bucket in self.buckets:
            bucket.begin_gather(phase)

    def gather(self, phase: Phase) -> None:
        self.begin_gather(phase)
        for bucket in self.buckets:
            bucket.gather(phase)

    def release(self) -> None:
        for bucket in self.buckets:
            bucket.release()


def find_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Members of the outermost lists and sequences that have parameters."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (each for each in child if any(True for _ in each.parameters()))
        else:
            yield from find_blocks(child)


def build_units(module: nn.Module, units: Sequence[nn.Module], bucket: Callable[[Named], FlatBucket]) -> list[Unit]:
    """The root's first, then those of `units` in order; a bucket holds one dtype, trained or not."""
    readers: dict[int, set[int]] = {}
    for index, unit in enumerate(units):
        for parameter in unit.parameters():
            readers.setdefault(id(parameter), set()).add(index)
    inside = tuple(_prefixes(module, units))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not name.startswith(inside):  # tied to something outside of units: the root's
            readers.setdefault(id(parameter), set()).add(-1)
    named: list[Named] = [[] for _ in range(len(units) + 1)]
    for name, parameter in module.named_parameters():
        of = readers[id(parameter)]
        named[next(iter(of)) + 1 if len(of) == 1 else 0].append((name, parameter))
    return [Unit([bucket(alike) for alike in _alike(each)]) for each in named]


def _alike(named: Named) -> Iterator[Named]:
    kinds: dict[tuple[bool, torch.dtype], Named] = {}
    for name, parameter in named:
        kinds.setdefault((parameter.requires_grad, parameter.dtype), []).append((name, parameter))
    yield from kinds.values()


def _prefixes(module: nn.Module, units: Sequence[nn.Module]) -> Iterator[str]:
    inside = {id(unit) for unit in units}
    return (f"{name}." for name, each in module.named_modules(remove_duplicate=False) if id(each) in inside)
