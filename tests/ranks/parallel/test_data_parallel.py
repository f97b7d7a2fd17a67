"""Any module under data parallelism and ZeRO equals itself on one process: gradients, norm, weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.comm.mesh import Mesh
from meshwright.parallel.data_parallel import data_parallel
from meshwright.testing.ranks import run_cases
from tests.ranks.parallel.modules import (
    Case,
    Loss,
    Net,
    NetAgain,
    NetDropping,
    NetReentrant,
    RoutedNet,
    adapted_blocks,
    adapted_loss,
    equals_one_process,
    frozen_below,
    nothing_used,
    own_layers,
    plain_loss,
    routed_loss,
    twice,
    twice_but_not_alike,
)

STORIES: list[tuple[str, Callable[[], nn.Module], Loss]] = [
    ("tied, odd sizes", Net, plain_loss),
    ("other layers on each rank", Net, own_layers),
    ("other layers hand on what they got", NetDropping, own_layers),
    ("nothing used on rank 0", Net, nothing_used),
    ("two forwards a backward", Net, twice),
    ("two forwards that differ between ranks", Net, twice_but_not_alike),
    ("adapters on frozen layers", adapted_blocks, adapted_loss),
    ("frozen below", frozen_below, plain_loss),
    ("other experts on each rank, one unused", RoutedNet, routed_loss),
    ("blocks run again", NetAgain, plain_loss),
    ("blocks run again, reentrant", NetReentrant, plain_loss),
]


def cases(dp: int, within: int = 0, stages: tuple[int, ...] = (0, 1, 2, 3)) -> list[Case]:
    return [
        Case(f"{name}, stage {zero}, {dp} ranks, groups of {within}", dp, zero, build, loss, within=within)
        for name, build, loss in STORIES
        for zero in stages
    ]


@pytest.mark.parametrize("dp", [2, pytest.param(3, marks=pytest.mark.prove)])
def test_any_module_equals_itself_on_one_process(dp: int) -> None:
    """Experts are B50: an expert without a token on a rank, or anywhere, is no missing collective."""
    run_cases(equals_one_process, dp, cases(dp), timeout=110)


def test_hybrid_groups_equal_one_process() -> None:
    """Two groups of two: pieces meet inside a group, sums also between the two."""
    run_cases(equals_one_process, 4, cases(4, 2, (1, 3)) + cases(4, 2, (2,))[:2], timeout=110)


def test_groups_of_one_and_of_all() -> None:
    """A group of one copies everything; one of all ranks is no hybrid."""
    both = [
        Case(f"groups of {within}, stage {zero}", 2, zero, within=within) for within in (1, 2) for zero in (1, 2, 3)
    ]
    run_cases(equals_one_process, 2, both, timeout=110)


def test_wrong_requests_are_refused() -> None:
    module, mesh = nn.Linear(2, 2), Mesh(dp=1)
    with pytest.raises(ValueError, match="0, 1, 2 or 3"):
        data_parallel(module, mesh, zero=4)
    with pytest.raises(ValueError, match="parallelize"):
        data_parallel(module, Mesh(tp=2))
    parallel = data_parallel(module, mesh)
    with pytest.raises(ValueError, match="already"):
        data_parallel(module, mesh)
    with pytest.raises(RuntimeError, match="without a backward"):
        parallel.step(torch.optim.SGD(parallel.parameter_groups(0.0), lr=1.0))
