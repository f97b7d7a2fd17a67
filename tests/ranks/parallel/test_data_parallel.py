"""Any module under data parallelism and ZeRO equals itself on one process: gradients, norm, weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.comm.mesh import Mesh
from meshwright.parallel.data_parallel import data_parallel
from meshwright.testing.exact import figure_of_difference
from meshwright.testing.ranks import run_cases

Loss = Callable[[nn.Module, int, int, int], Tensor]
"""(module, rank, step, micro-batch) -> ()"""


@lru_cache(maxsize=2)
def mesh_of(dp: int) -> Mesh:
    return Mesh(dp=dp).start()


def data(rank: int, step: int, micro: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


class Block(nn.Module):
    """Parameters of 57, 1, 7 and 64 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(57).view(3, 19))
        self.scale = nn.Parameter(torch.randn(1))
        self.shift = nn.Parameter(torch.randn(7))
        self.square = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.square(x))
        first = hidden[:, :3] @ self.wide
        rest = torch.cat((self.shift * first[:, :7], self.scale * hidden[:, :1]), dim=1)
        return x + torch.tanh(rest)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.never = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor, skip: int = -1) -> Tensor:
        x = x @ self.embedding.weight[:8]
        for number, block in enumerate(self.blocks):
            if number != skip:
                x = block(x)
        logits: Tensor = self.head(x)
        return logits


class AdaptedBlock(nn.Module):
    """A frozen layer and a trained adapter of rank 2 around it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def plain_loss(module: nn.Module, rank: int, step: int, micro: int) -> Tensor:
    return module(data(rank, step, micro, 4, 8)).square().mean()


def own_layers(module: nn.Module, rank: int, step: int, micro: int) -> Tensor:
    """Every rank leaves out another block, another one each step; each is unused somewhere, one everywhere."""
    return module(data(rank, step, micro, 4, 8), skip=(rank + step) % 3 if rank else 0).square().mean()


def nothing_used(module: nn.Module, rank: int, step: int, micro: int) -> Tensor:
    """Rank 0's loss depends on no parameter."""
    return plain_loss(module, rank, step, micro) if rank else torch.zeros((), dtype=torch.float64)


def twice(module: nn.Module, rank: int, step: int, micro: int) -> Tensor:
    """Two forwards before one backward."""
    first, second = (module(data(rank, step, 2 * micro + i, 4, 8)) for i in range(2))
    return (first * second).mean()


def twice_but_not_alike(module: nn.Module, rank: int, step: int, micro: int) -> Tensor:
    """The last layer is used in the second forward by even ranks, in the first by odd ones; in neither twice."""
    skips = (2, -1) if rank % 2 == 0 else (-1, 2)
    outputs = [module(data(rank, step, micro, 4, 8) / (1 + turn), skip) for turn, skip in enumerate(skips)]
    loss: Tensor = sum(output.square().mean() for output in outputs)
    return loss


def adapted_loss(module: nn.Module, rank: int, step: int, micro: int) -> Tensor:
    return module(data(rank, step, micro, 4, 6)).square().mean()


@dataclass(frozen=True)
class Case:
    name: str
    dp: int
    zero: int
    build: Callable[[], nn.Module] = Net
    loss: Loss = plain_loss
    micros: int = 2


def adapted_blocks() -> nn.Module:
    return nn.Sequential(*(AdaptedBlock() for _ in range(3)))


def equals_one_process(rank: int, case: Case) -> None:
    torch.manual_seed(rank)  # values are rank 0's, whatever the others built
    module = case.build().double()
    torch.manual_seed(0)
    plain = case.build().double()
    frozen = {name: p.detach().clone() for name, p in plain.named_parameters() if not p.requires_grad}
    parallel = data_parallel(module, mesh_of(case.dp), zero=case.zero)
    optimizer = torch.optim.AdamW(parallel.parameter_groups(0.1), lr=0.05, eps=1e-3)
    decays = [p for p in plain.parameters() if p.requires_grad and p.dim() >= 2]
    others = [p for p in plain.parameters() if p.requires_grad and p.dim() < 2]
    reference = torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.05, eps=1e-3
    )
    between = parallel.allocator.total
    for step in range(3):
        reference.zero_grad(set_to_none=False)
        for micro in range(case.micros):
            parallel.backward(case.loss(module, rank, step, micro))
            for other in range(case.dp):
                share = case.loss(plain, other, step, micro) / case.dp
                if share.requires_grad:
                    share.backward()
        for parameter in plain.parameters():  # unused everywhere: zero, not nothing, and decay still moves it
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        wanted = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.05))
        reference.step()
        assert parallel.step(optimizer, clip_norm=0.05) == pytest.approx(wanted, rel=1e-12)
        assert parallel.allocator.total == between, "a step left memory behind"
        with parallel.gathered():
            named = dict(module.named_parameters())
            largest = max(float(p.detach().abs().max()) for p in plain.parameters())
            for name, parameter in plain.named_parameters():
                assert figure_of_difference(named[name].detach(), parameter.detach(), largest) < 1e-12, (step, name)
            assert all(torch.equal(named[name], value) for name, value in frozen.items())
    held = sum(p.numel() for p in optimizer.state if p.numel())
    trained = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    total = torch.tensor(held)
    dist.all_reduce(total)
    assert int(total) == trained * (1 if case.zero else case.dp), "state of a padding or a frozen element"


def cases(dp: int) -> list[Case]:
    stories: list[tuple[str, Callable[[], nn.Module], Loss]] = [
        ("tied, odd sizes", Net, plain_loss),
        ("other layers on each rank", Net, own_layers),
        ("nothing used on rank 0", Net, nothing_used),
        ("two forwards a backward", Net, twice),
        ("two forwards that differ between ranks", Net, twice_but_not_alike),
        ("adapters on frozen layers", adapted_blocks, adapted_loss),
    ]
    return [
        Case(f"{name}, stage {zero}, {dp} ranks", dp, zero, build, loss)
        for name, build, loss in stories
        for zero in range(4)
    ]


@pytest.mark.parametrize("dp", [2, 3])
def test_any_module_equals_itself_on_one_process(dp: int) -> None:
    run_cases(equals_one_process, dp, cases(dp), timeout=110)


def consolidates(rank: int, case: Case) -> None:
    """Bit for bit, with padding that is NaN; a norm without it; a rank may own nothing at all."""
    torch.manual_seed(0)
    module = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in (1, 7, 57, 64))
    start = copy.deepcopy(module)
    parallel = data_parallel(module, mesh_of(case.dp), zero=case.zero)
    for bucket in parallel._buckets():
        used = torch.zeros(bucket.numel, dtype=torch.bool)
        for slot in bucket.slots:
            used[slot.offset : slot.stop] = True
        bucket._kept[~used[bucket.first : bucket.last]] = torch.nan
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
    module = nn.Linear(3, 5, bias=False)
    with torch.no_grad():
        module.weight.zero_()
    parallel = data_parallel(module, mesh_of(case.dp), zero=case.zero)
    for gradient in (1.0, 2.0, 4.0, 8.0):
        with parallel.gathered():
            parallel.backward(gradient * module(torch.ones(1, 3)).sum())
    parallel.step(torch.optim.SGD(parallel.parameter_groups(0.0), lr=1.0))
    with parallel.gathered():
        assert torch.equal(module.weight, torch.full((5, 3), -15.0))


def weighs_ragged_batches(rank: int, case: Case) -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 1, bias=False).double()
    plain = copy.deepcopy(module)
    parallel = data_parallel(module, mesh_of(case.dp), zero=case.zero)
    rows = [data(r, 0, 0, 1 + 3 * r, 4) for r in range(case.dp)]
    parallel.backward(parallel.mean_loss(module(rows[rank]).square().sum(), len(rows[rank])))
    plain(torch.cat(rows)).square().mean().backward()
    assert parallel.step(torch.optim.SGD(parallel.parameter_groups(0.0), lr=1.0)) == pytest.approx(
        float(plain.weight.grad.norm()), rel=1e-13
    )


def skips_together(rank: int, case: Case) -> None:
    module = nn.Linear(3, 5)
    parallel = data_parallel(module, mesh_of(case.dp), zero=case.zero)
    with parallel.gathered():
        start = [p.detach().clone() for p in module.parameters()]
        parallel.backward(module(torch.full((1, 3), torch.inf if rank else 1.0)).sum())
    assert not parallel.step(torch.optim.SGD(parallel.parameter_groups(0.0), lr=1.0)) < torch.inf
    with parallel.gathered():
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), start, strict=True))


@pytest.mark.parametrize("dp", [2, 3, 4])
def test_consolidation_accumulation_means_and_skips(dp: int) -> None:
    stages = [Case(f"stage {zero}", dp, zero) for zero in range(4)]
    run_cases(everything, dp, stages)


def everything(rank: int, case: Case) -> None:
    for check in (consolidates, accumulates, weighs_ragged_batches, skips_together):
        check(rank, case)


def test_wrong_requests_are_refused() -> None:
    module, mesh = nn.Linear(2, 2), Mesh(dp=1)
    with pytest.raises(ValueError, match="0, 1, 2 or 3"):
        data_parallel(module, mesh, zero=4)
    with pytest.raises(ValueError, match="parallelize"):
        data_parallel(module, Mesh(tp=2))
    data_parallel(module, mesh)
    with pytest.raises(ValueError, match="already"):
        data_parallel(module, mesh)
