"""Data parallelism and ZeRO beside PyTorch's own: CPU seconds and peak tensor bytes of a training step.

    python benchmarks/zero.py --ranks 2                     every pair, 5 rounds
    python benchmarks/zero.py --ranks 4 --pairs stage3      one of them
    python benchmarks/zero.py --ranks 2 --peak              peak bytes instead of time
    python benchmarks/zero.py --ranks 2 --json FILE         the figures as JSON too
    python benchmarks/zero.py --pairs deepspeed1            DeepSpeed, where it is installed: DS_ACCELERATOR=cpu

The step is that of `workload.py`, the clock and the figures those of `pairs.py`. One thread a rank, glibc keeps freed
memory (mallopt) for both sides. Peak bytes are what torch's CPU allocator held at most, from before the model was
built, each side alone, without what ranks have mapped of each other.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pairs import Report, Seconds, Step, launch, parser, summarise, take_turns
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from workload import ARCH, OPTIMIZER, RATE, SEQUENCES, adamw, batch, plan_of

from meshwright.comm.mesh import Mesh
from meshwright.data.batch import Batch
from meshwright.layout.axes import Degrees
from meshwright.model import build_decoder, initialise, rows_to_torch
from meshwright.model.loss import loss
from meshwright.parallel.engine import Engine
from meshwright.plan.plan import Sharding


class Ours:
    """A step of the engine."""

    def __init__(self, zero: int, ranks: int) -> None:
        plan = plan_of(Degrees(dp=ranks), SEQUENCES // ranks, Sharding(zero))
        self._engine = Engine(plan, Mesh(dp=ranks).start())

    def __call__(self, batch: Batch) -> float:
        return self._engine.step(batch, RATE).loss

    @property
    def foreign_bytes(self) -> int:
        """Shards of other ranks, mapped here: torch's profiler counts them too, but they are the others' memory."""
        return sum(sum(each.nbytes for each in s.shards) - s.shards[0].nbytes for s in self._engine.stores if s.shards)


def ours(zero: int) -> Callable[[int], Step]:
    return lambda ranks: Ours(zero, ranks)


class Loss(nn.Module):
    """The plain model as peers want it: a module whose forward gives the mean loss of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = build_decoder(ARCH, dtype=torch.float32, device="cpu")
        initialise(self.decoder, ARCH, 0)

    def forward(self, tokens: Tensor, rows: Any, labels: Tensor, count: Tensor) -> Tensor:
        return loss(self.decoder(tokens, rows), labels, count)


def training(module: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        rows = rows_to_torch(batch.rows, ARCH)
        count = torch.tensor(batch.trained_tokens)
        mean = module(torch.from_numpy(batch.inputs), rows, torch.from_numpy(batch.labels), count)
        mean.backward()
        optimizer.step()
        return float(mean.detach())

    return step


def local(_: int) -> Step:
    """No communication at all: what remains whatever the engine does."""
    module = Loss()
    return training(module, adamw(module.parameters()))


def ddp(_: int) -> Step:
    module = DistributedDataParallel(Loss())
    return training(module, adamw(module.parameters()))


def zero_redundancy(_: int) -> Step:
    module = DistributedDataParallel(Loss())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own use of a deprecated annotation
        optimizer = ZeroRedundancyOptimizer(
            module.parameters(), torch.optim.AdamW, lr=RATE, betas=OPTIMIZER.betas, weight_decay=0.1, fused=True
        )
    return training(module, optimizer)


def fsdp(reshard: bool) -> Callable[[int], Step]:
    def build(ranks: int) -> Step:
        module = Loss()
        mesh = torch.distributed.init_device_mesh("cpu", (ranks,))
        for unit in module.decoder.units:
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        return training(module, adamw(module.parameters()))

    return build


def deepspeed(stage: int) -> Callable[[int], Step]:
    """Its engine with torch's optimizer, as it asks for; it is no requirement and need not be installed."""

    def build(ranks: int) -> Step:
        os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "RANK": str(dist.get_rank()), "WORLD_SIZE": str(ranks)}
        from deepspeed import initialize

        module = Loss()
        settings = {
            "train_micro_batch_size_per_gpu": SEQUENCES // ranks,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = initialize(model=module, optimizer=adamw(module.parameters()), config=settings)

        def step(batch: Batch) -> float:
            rows = rows_to_torch(batch.rows, ARCH)
            count = torch.tensor(batch.trained_tokens)
            mean = engine(torch.from_numpy(batch.inputs), rows, torch.from_numpy(batch.labels), count)
            engine.backward(mean)
            engine.step()
            return float(mean.detach())

        return step

    return build


PAIRS: dict[str, tuple[Callable[[int], Step], Callable[[int], Step]]] = {
    "local": (local, ours(0)),
    "stage0": (ddp, ours(0)),
    "stage1": (zero_redundancy, ours(1)),
    "stage2": (fsdp(False), ours(2)),
    "stage3": (fsdp(True), ours(3)),
    "deepspeed1": (deepspeed(1), ours(1)),
    "deepspeed2": (deepspeed(2), ours(2)),
    "deepspeed3": (deepspeed(3), ours(3)),
}
"""name -> (theirs, ours), built on every rank."""


def measure_pair(rank: int, ranks: int, pair: str, rounds: int, warm_up: int) -> Seconds:
    theirs, mine = PAIRS[pair]
    sides = {"theirs": theirs(ranks), "ours": mine(ranks)}
    return take_turns(sides, lambda number: batch(number).part(rank, ranks), rounds, warm_up)


def measure_peak(rank: int, ranks: int, pair: str, side: str) -> int:
    """Most bytes that the CPU allocator held for one side, from before its model was built."""
    build = PAIRS[pair][0 if side == "theirs" else 1]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = build(ranks)
        for number in range(3):
            step(batch(number).part(rank, ranks))
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, num_bytes in memory:
        held += num_bytes
        peak = max(peak, held)
    return peak - (step.foreign_bytes if isinstance(step, Ours) else 0)


def main() -> None:
    arguments = parser("zero", __doc__)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--peak", action="store_true", help="peak bytes instead of time")
    asked = arguments.parse_args()
    report = Report("zero", asked)
    for pair in asked.pairs:
        if asked.peak:
            peaks = {side: max(launch(asked.ranks, measure_peak, pair, side)) for side in ("ours", "theirs")}
            print(f"{pair}: ours {peaks['ours'] / 2**20:.0f} MiB, theirs {peaks['theirs'] / 2**20:.0f} MiB", flush=True)
            report.add("peaks", pair, {"ranks": asked.ranks, **{f"{side}_peak_bytes": n for side, n in peaks.items()}})
        else:
            results = launch(asked.ranks, measure_pair, pair, asked.rounds, asked.warm_up)
            report.pair(pair, asked.ranks, summarise(results))


if __name__ == "__main__":
    main()
