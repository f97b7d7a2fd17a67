"""Numbers set by hand through `data_parallel`, exact to the bit: consolidation, accumulation, norms, means, skips."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from meshwright.parallel.data_parallel import data_parallel
from meshwright.testing.ranks import run_cases
from tests.ranks.parallel.modules import Case, data


def consolidates(rank: int, case: Case) -> None:
    """Bit for bit, with padding that is NaN; a norm without it; a rank may own nothing at all."""
    torch.manual_seed(0)
    module = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in (1, 7, 57, 64))
    start = copy.deepcopy(module)
    parallel = data_parallel(module, case.mesh, zero=case.zero)
    for bucket in parallel.buckets():
        used = torch.zeros(bucket.numel, dtype=torch.bool)
        for slot in bucket.slots:
            used[slot.offset : slot.stop] = True
        bucket.kept[~used[bucket.first : bucket.last]] = torch.nan
    with parallel.gathered():
        for one, other in zip(module, start, strict=True):
            assert torch.equal(one, other)
        parallel.backward(sum(((rank + 1) * p).sum() for p in module))
    optimizer = torch.optim.SGD(parallel.parameter_groups(0.0), lr=1.0)
    mean = (case.dp + 1) / 2
    assert parallel.step(optimizer) == pytest.approx(mean * 129**0.5, rel=1e-6)
    with parallel.gathered():
        for one, other in zip(module, start, strict=True):
            assert torch.equal(one, other - mean)


def accumulates(rank: int, case: Case) -> None:
    """Micro-batch gradients of 1, 2, 4, 8 add up to 15 everywhere."""
    module = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 1, bias=False))
    with torch.no_grad():
        module[0].weight.zero_()
        module[1].weight.fill_(1.0)
    parallel = data_parallel(module, case.mesh, zero=case.zero)
    for gradient in (1.0, 2.0, 4.0, 8.0):
        parallel.backward(gradient * module(torch.ones(1, 3)).sum())
    parallel.step(torch.optim.SGD(parallel.parameter_groups(0.0), lr=1.0))
    with parallel.gathered():
        assert torch.equal(module[0].weight, torch.full((5, 3), -15.0))
        assert torch.equal(module[1].weight, torch.ones(1, 5))


def counts_each_element_once(rank: int, case: Case) -> None:
    """B12, B13: 3 and 4 in pieces, 12 somewhere else: 13 wherever they lie, and one coefficient for all."""
    for order in ((3.0, 4.0, 12.0), (12.0, 3.0, 4.0), (4.0, 12.0, 3.0)):
        module = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in (1, 200, 7))
        parallel = data_parallel(module, case.mesh, zero=case.zero)
        with parallel.gathered():
            parallel.backward(sum(value * p[-1] for value, p in zip(order, module, strict=True)))
        assert parallel.step(torch.optim.SGD(parallel.parameter_groups(0.0), lr=1.0), clip_norm=6.5) == 13.0
        with parallel.gathered():
            for value, p in zip(order, module, strict=True):
                assert float(p.detach()[-1]) == pytest.approx(-value / 2, rel=1e-6)


def weighs_ragged_batches(rank: int, case: Case) -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 1, bias=False).double()
    plain = copy.deepcopy(module)
    parallel = data_parallel(module, case.mesh, zero=case.zero)
    rows = [data(r, 0, 0, 1 + 3 * r, 4) for r in range(case.dp)]
    parallel.backward(parallel.mean_loss(module(rows[rank]).square().sum(), len(rows[rank])))
    plain(torch.cat(rows)).square().mean().backward()
    assert parallel.step(torch.optim.SGD(parallel.parameter_groups(0.0), lr=1.0)) == pytest.approx(
        float(plain.weight.grad.norm()), rel=1e-13
    )


def skips_together(rank: int, case: Case) -> None:
    """B22: what is not finite on the last rank moves no weight on any; the next step is taken by all."""
    module = nn.Linear(3, 5)
    parallel = data_parallel(module, case.mesh, zero=case.zero)
    optimizer = torch.optim.SGD(parallel.parameter_groups(0.0), lr=1.0)
    with parallel.gathered():
        start = [p.detach().clone() for p in module.parameters()]
    for value in (torch.inf, torch.nan, 1.0):
        parallel.backward(module(torch.full((1, 3), value if rank == case.dp - 1 else 1.0)).sum())
        assert (parallel.step(optimizer) < torch.inf) == (value == 1.0)
        with parallel.gathered():
            moved = [not torch.equal(a, b) for a, b in zip(module.parameters(), start, strict=True)]
        assert all(moved) if value == 1.0 else not any(moved)


def everything(rank: int, case: Case) -> None:
    for check in (consolidates, accumulates, counts_each_element_once, weighs_ragged_batches, skips_together):
        check(rank, case)


@pytest.mark.parametrize(
    ("dp", "within"), [(2, 0), (4, 2), *(pytest.param(dp, 0, marks=pytest.mark.prove) for dp in (3, 4))]
)
def test_hand_set_numbers_are_exact(dp: int, within: int) -> None:
    stages = [Case(f"stage {zero}, groups of {within}", dp, zero, within=within) for zero in range(4)]
    run_cases(everything, dp, stages, timeout=110)
