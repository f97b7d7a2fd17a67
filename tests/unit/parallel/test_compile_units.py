"""One process may compile any number of engines: the ladder of `verify` makes one a rung."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.parallel.compile import compile_units


class Named(nn.Module):
    """Like a unit of a tensor rank: its graph holds a name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * len(self.name)


def test_engines_do_not_count_against_each_others_limit_of_graphs() -> None:
    for engine in range(1, 12):  # torch allows 8 graphs a function
        blocks = [Named("n" * engine) for _ in range(3)]
        compile_units(blocks, backend="eager")
        for block in blocks:
            assert torch.equal(block(torch.ones(4)), torch.full((4,), float(engine)))
