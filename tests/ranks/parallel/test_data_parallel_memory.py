"""What `data_parallel` holds at every instant of its allocator: units, gradients, peaks, predicted to the byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.parallel.data_parallel import DataParallel, data_parallel
from meshwright.testing.ranks import run_cases
from tests.ranks.parallel.modules import mesh_of

WIDTH, LAYERS, RANKS = 16, 6, 2
BLOCK = WIDTH * WIDTH
"""Elements of a block's weight: a multiple of what a shard begins at, so that nothing is padded."""


class Layer(nn.Module):
    def __init__(self, trained: bool = True, unused: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH, requires_grad=trained)
        self.gain = nn.Parameter(torch.ones(WIDTH)) if not trained else None
        self.unused = nn.Parameter(torch.ones(WIDTH)) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight)
        return x + (y if self.gain is None else y * self.gain)


class Stack(nn.Module):
    def __init__(self, **kind: bool) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer(**kind) for _ in range(LAYERS))

    def forward(self, x: Tensor, skip: int = -1) -> Tensor:
        x = self.entry(x)
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = layer(x)
        return x


def frozen() -> Stack:
    return Stack(trained=False)


def with_unused() -> Stack:
    return Stack(unused=True)


class Again(Stack):
    """Each layer runs again in backward, in a graph of its own."""

    def forward(self, x: Tensor, skip: int = -1) -> Tensor:
        x = self.entry(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def with_unused_again() -> Stack:
    return Again(unused=True)


@dataclass(frozen=True)
class Case:
    name: str
    zero: int
    build: Callable[[], Stack] = Stack
    skips: bool = False
    micros: int = 1


class Trace:
    """The most units at once that are whole, and that hold a gradient which is not reduced, the root apart."""

    def __init__(self, parallel: DataParallel) -> None:
        self.units = parallel._units[1:]
        self.whole = self.unreduced = 0
        parallel.allocator.on_event = lambda _: self.look()

    def look(self) -> None:
        self.whole = max(self.whole, sum(any(size(b.whole) for b in unit.buckets) for unit in self.units))
        held = [[b.gradient for b in unit.trained if b.gradient is not None] for unit in self.units]
        self.unreduced = max(self.unreduced, sum(any(map(size, gradients)) for gradients in held))


def size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def holds(rank: int, case: Case) -> tuple[int, int, int, int]:
    torch.manual_seed(0)
    module = case.build()
    parallel = data_parallel(module, mesh_of(RANKS), zero=case.zero)
    optimizer = torch.optim.SGD(parallel.parameter_groups(0.0), lr=0.1)
    trace, between = Trace(parallel), parallel.allocator.total
    parallel.allocator.reset_peak()
    for step in range(2):
        for _ in range(case.micros):
            skip = (rank + step) % LAYERS if case.skips else -1
            parallel.backward(module(torch.randn(4, WIDTH), skip).square().mean())
        parallel.step(optimizer)
        assert parallel.allocator.total == between, "a step left memory behind"
    return trace.whole, trace.unreduced, between, parallel.allocator.peak


def test_at_every_instant_few_units_are_whole_and_few_gradients_unreduced() -> None:
    """With the root three units are whole at stage 3, and two hold unreduced gradients at stages 2 and 3."""
    cases = [
        Case(f"stage {zero}, {name}, {micros}", zero, build, skips, micros)
        for zero in range(4)
        for micros in (1, 3)
        for name, build, skips in (("plain", Stack, False), ("frozen", frozen, False), ("skips", Stack, True))
    ]
    for of_rank in run_cases(holds, RANKS, cases, timeout=90):
        for case, (whole, unreduced, _, _) in zip(cases, of_rank, strict=True):
            assert whole == LAYERS if case.zero < 3 else whole <= 2, case.name
            assert unreduced == LAYERS if case.zero < 2 else unreduced <= 2, case.name


def test_parameters_that_are_not_used_hold_nothing_back() -> None:
    """Gradients are reduced and units released as they would be without: of no use is told apart from not yet."""
    cases = [Case(f"stage {zero}", zero, with_unused) for zero in (2, 3)]
    cases.append(Case("stage 3, in checkpoints", 3, with_unused_again))
    for of_rank in run_cases(holds, RANKS, cases):
        assert [unreduced <= 2 for _, unreduced, _, _ in of_rank] == [True] * 3
        assert [whole for whole, _, _, _ in of_rank] == [LAYERS, 2, 2]


def test_peaks_are_what_the_stages_say() -> None:
    """U units of B bytes on W ranks, one the root; between steps and at most, above it:

    stage 0   U B      + U B                             gradients
    stage 1   U B      + U B                             reduced in place
    stage 2   U B      + U B/W + ...                     two unreduced and the root's, which comes last
    stage 3   U B/W    + U B/W + ...                     three whole as well
    """
    cases = [Case(f"stage {zero}", zero) for zero in range(4)]
    unit, units = BLOCK * 4, LAYERS + 1
    for of_rank in run_cases(holds, RANKS, cases):
        between = [low for _, _, low, _ in of_rank]
        peak = [high for _, _, _, high in of_rank]
        assert between == [units * unit] * 3 + [units * unit // RANKS]
        assert peak[0] == peak[1] == 2 * units * unit
        # At its fullest every shard but the last two is there, the root's gradient beside the first unit's.
        assert peak[2] <= units * unit + units * unit // RANKS + 2 * unit
        assert peak[3] <= units * unit // RANKS + units * unit // RANKS + 3 * unit + 2 * unit
        assert peak[3] < peak[2] < peak[1]
