"""Your own module, loop and optimizer on several ranks, with ZeRO.

    torchrun --nproc-per-node 2 examples/data_parallel.py            everything whole on every rank
    torchrun --nproc-per-node 2 examples/data_parallel.py 3          parameters, gradients and optimizer in pieces

What differs from a loop on one process: `data_parallel` around the module, the optimizer made of this rank's pieces,
`parallel.backward` and `parallel.step` in place of their namesakes.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw

WIDTH, STEPS = 64, 100


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main() -> None:
    zero = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, WIDTH), *(Layer() for _ in range(4)), nn.Linear(WIDTH, 1))
    parallel = mw.data_parallel(module, mw.Mesh(dp=ranks).start(), zero=zero)
    optimizer = torch.optim.AdamW(parallel.parameter_groups(weight_decay=0.01), lr=1e-3)

    data = torch.Generator().manual_seed(1 + rank)  # every rank reads samples of its own
    for step in range(STEPS):
        inputs = torch.randn(32, 8, generator=data)
        wanted = inputs.square().sum(1, keepdim=True)
        loss = nn.functional.mse_loss(module(inputs), wanted)
        parallel.backward(loss)
        norm = parallel.step(optimizer, clip_norm=1.0)
        if rank == 0 and step % 20 == 0:
            held = parallel.allocator.total / 2**20
            print(f"step {step}: loss {loss.item():.3f}, norm {norm:.3f}, parameters {held:.2f} MiB a rank")

    with parallel.gathered():  # every parameter whole: to save, or to use the module
        if rank == 0:
            print(f"{sum(p.numel() for p in module.parameters())} parameters trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
