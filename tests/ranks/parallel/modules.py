"""Modules of every awkward kind under `data_parallel`, and the one process that they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.comm.mesh import Mesh
from meshwright.parallel.data_parallel import data_parallel
from meshwright.testing.exact import figure_of_difference

Loss = Callable[[nn.Module, int, int, int], Tensor]
"""(module, rank, step, micro-batch) -> ()"""


@lru_cache(maxsize=4)
def mesh_of(dp: int, within: int = 0) -> Mesh:
    """Communicators are made once a launch."""
    return Mesh(dp=dp, shard_within=within).start()


def data(rank: int, step: int, micro: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


# ---------------------------------------------------------------- modules


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
    """Three blocks between tied weights. `again`: each block runs again in backward, by torch's checkpoint."""

    again = ""

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
                x = checkpoint(block, x, use_reentrant=self.again == "reentrant") if self.again else block(x)
        logits: Tensor = self.head(x)
        return logits


class Droppable(Block):
    """A block that leaves itself out by handing on what it was given."""

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        return x if skip else super().forward(x)


class NetDropping(Net):
    """Blocks are always called, and some of them do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Droppable() for _ in range(4))

    def forward(self, x: Tensor, skip: int = -1) -> Tensor:
        x = x @ self.embedding.weight[:8]
        for number, block in enumerate(self.blocks):
            x = block(x, skip=number == skip)
        logits: Tensor = self.head(x)
        return logits


class NetAgain(Net):
    again = "non-reentrant"


class NetReentrant(Net):
    again = "reentrant"


class AdaptedBlock(nn.Module):
    """A frozen layer and a trained adapter of rank 2 around it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted_blocks() -> nn.Module:
    return nn.Sequential(*(AdaptedBlock() for _ in range(3)))


def frozen_below() -> nn.Module:
    """The first block and the tied embedding are frozen."""
    net = Net()
    net.embedding.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    return net


class Routed(nn.Module):
    """Top-1 of five experts a token; expert 4 is never chosen, and which of the others are depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 5, bias=False)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        scores = self.router(x).masked_fill(~allowed, -torch.inf).softmax(-1)
        best, chosen = scores.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():  # an expert without a token takes no part in the graph
                out = out.index_put((mine,), best[mine, None] * expert(x[mine]))
        return x + torch.tanh(out)


class RoutedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(2))

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, allowed)
        return x


# ---------------------------------------------------------------- losses


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


def routed_loss(module: nn.Module, rank: int, step: int, micro: int) -> Tensor:
    """Rank 0 is sent to experts 0 and 1, the others to 2 and 3 (B50)."""
    allowed = torch.tensor([rank == 0] * 2 + [rank > 0] * 2 + [False])
    return module(data(rank, step, micro, 16, 6), allowed).square().mean()


# ---------------------------------------------------------------- the comparison


@dataclass(frozen=True)
class Case:
    name: str
    dp: int
    zero: int
    build: Callable[[], nn.Module] = Net
    loss: Loss = plain_loss
    micros: int = 2
    within: int = 0

    @property
    def mesh(self) -> Mesh:
        return mesh_of(self.dp, self.within)


STEPS, RATE, DECAY, CLIP = 3, 0.05, 0.1, 0.05


def equals_one_process(rank: int, case: Case) -> None:
    torch.manual_seed(rank)  # values are rank 0's, whatever the others built
    module = case.build().double()
    torch.manual_seed(0)
    plain = case.build().double()
    frozen = {name: p.detach().clone() for name, p in plain.named_parameters() if not p.requires_grad}
    parallel = data_parallel(module, case.mesh, zero=case.zero)
    optimizer = torch.optim.AdamW(parallel.parameter_groups(DECAY), lr=RATE, eps=1e-3)
    reference = plain_optimizer(plain)
    between = parallel.allocator.total
    for step in range(STEPS):
        reference.zero_grad(set_to_none=False)
        for micro in range(case.micros):
            parallel.backward(case.loss(module, rank, step, micro))
            for other in range(case.dp):
                share = case.loss(plain, other, step, micro) / case.dp
                if share.requires_grad:
                    share.backward()
        wanted = plain_step(plain, reference)
        assert parallel.step(optimizer, clip_norm=CLIP) == pytest.approx(wanted, rel=1e-12)
        assert parallel.allocator.total == between, "a step left memory behind"
        with parallel.gathered():
            named = dict(module.named_parameters())
            largest = max(float(p.detach().abs().max()) for p in plain.parameters())
            for name, parameter in plain.named_parameters():
                assert figure_of_difference(named[name].detach(), parameter.detach(), largest) < 1e-12, (step, name)
            assert all(torch.equal(named[name], value) for name, value in frozen.items())
    held = torch.tensor(sum(p.numel() for p in optimizer.state if p.numel()))
    trained = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    dist.all_reduce(held)
    copies = case.dp if case.zero == 0 else case.dp // case.within if case.within else 1
    assert int(held) == trained * copies, "state of a padding or a frozen element"


def plain_optimizer(plain: nn.Module) -> torch.optim.Optimizer:
    decays = [p for p in plain.parameters() if p.requires_grad and p.dim() >= 2]
    others = [p for p in plain.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": decays, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, eps=1e-3)


def plain_step(plain: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """-> the norm before clipping. What nobody used has a gradient of zero, not none: decay still moves it."""
    for parameter in plain.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    norm = float(nn.utils.clip_grad_norm_(plain.parameters(), CLIP))
    optimizer.step()
    return norm
