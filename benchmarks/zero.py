"""Data parallelism and ZeRO beside PyTorch's own: CPU seconds and peak tensor bytes of a training step.

    python benchmarks/zero.py --ranks 2                     every pair, 5 rounds
    python benchmarks/zero.py --ranks 4 --pairs stage3      one of them
    python benchmarks/zero.py --ranks 2 --peak              peak bytes instead of time
    python benchmarks/zero.py --ranks 2 --json FILE         the figures as JSON too
    python benchmarks/zero.py --pairs deepspeed1            DeepSpeed, where it is installed: DS_ACCELERATOR=cpu

The model: 8 layers, hidden 512, 8 heads, gated feed-forward of 1024, vocabulary 8192 untied, 29.4 million parameters
in float32; 8 sequences of 128 tokens a step over all ranks; fused AdamW, no clipping. One thread a rank, glibc keeps
freed memory (mallopt) for both sides.

Both sides of a pair live in one launch and take steps in turn, so that whatever else the machine does hits both:

    round 0   theirs ours        round 1   ours theirs        ...        ratio of a round: ours / theirs

A figure is the median over rounds of the mean over ranks of `time.process_time`, which counts all threads and the
kernel. Peak bytes are what torch's CPU allocator held at most, from before the model was built, each side alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from meshwright.arch.arch import Arch
from meshwright.comm.mesh import Mesh
from meshwright.config.choices import LearningRateSchedule
from meshwright.data.batch import Batch
from meshwright.launch.rank import prepare
from meshwright.layout.axes import Degrees
from meshwright.layout.rows import whole_rows
from meshwright.model import build_decoder, initialise, rows_to_torch
from meshwright.model.loss import loss
from meshwright.parallel.engine import Engine
from meshwright.plan import plan as plans
from meshwright.plan.rules import canonical

SEQUENCES, LENGTH, RATE = 8, 128, 3e-4
ARCH = Arch("llama", layers=8, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=1024, vocab=8192)
OPTIMIZER = plans.Optimizer(
    learning_rate=RATE, schedule=LearningRateSchedule.CONSTANT, warmup_steps=0, clip_norm=0.0,
    steps=0, min_learning_rate=0.0,
)  # fmt: skip

Step = Callable[[Batch], float]
"""One training step on a rank's batch; returns the loss."""


def plan_of(ranks: int, zero: int, reshard: bool) -> plans.Plan:
    plan = plans.Plan(
        name="benchmark",
        seed=0,
        arch=ARCH,
        start=plans.Start(),
        data=plans.Data(sequence_length=LENGTH),
        batch=plans.Batch(SEQUENCES, SEQUENCES // ranks),
        optimizer=OPTIMIZER,
        precision=plans.Precision(),
        degrees=Degrees(dp=ranks),
        sharding=plans.Sharding(zero, 0, reshard),
        pipeline=plans.Pipeline(stages=(ARCH.layers,)),
        context=plans.ContextSplit(),
        execution=plans.Execution(),
    )
    return canonical(plan)


def ours(zero: int, reshard: bool = True) -> Callable[[int], Step]:
    def build(ranks: int) -> Step:
        engine = Engine(plan_of(ranks, zero, reshard), Mesh(dp=ranks).start())
        return lambda batch: engine.step(batch, RATE).loss

    return build


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


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, betas=OPTIMIZER.betas, weight_decay=0.1, fused=True)


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


PAIRS: dict[str, tuple[str, Callable[[int], Step], Callable[[int], Step]]] = {
    "local": ("no communication", local, ours(0)),
    "stage0": ("DistributedDataParallel", ddp, ours(0)),
    "stage1": ("ZeroRedundancyOptimizer", zero_redundancy, ours(1)),
    "stage2": ("FSDP2 without reshard", fsdp(False), ours(2)),
    "stage3": ("FSDP2 with reshard", fsdp(True), ours(3)),
    "deepspeed1": ("DeepSpeed stage 1", deepspeed(1), ours(1)),
    "deepspeed2": ("DeepSpeed stage 2", deepspeed(2), ours(2)),
    "deepspeed3": ("DeepSpeed stage 3", deepspeed(3), ours(3)),
}
ASKED_FOR = ["local", *(name for name in PAIRS if name.startswith("deepspeed"))]
"""Pairs that run only where they are named."""
BARS = {
    2: {"stage0": 1.00, "stage1": 0.97, "stage2": 0.86, "stage3": 0.86},
    4: {"stage0": 1.00, "stage1": 0.97, "stage2": 0.86, "stage3": 0.70},
}
"""What the ratio of CPU seconds may be at most."""


def batches(rank: int, ranks: int, number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, ARCH.vocab, (SEQUENCES, LENGTH + 1), generator=generator).numpy()
    samples = torch.arange(SEQUENCES).numpy()
    whole = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), whole_rows(number, samples, LENGTH, None))
    return whole.part(rank, ranks)


def measure_pair(rank: int, ranks: int, pair: str, rounds: int, warm_up: int) -> dict[str, Any]:
    """CPU and wall seconds of every round on this rank."""
    _, theirs, mine = PAIRS[pair]
    sides = {"theirs": theirs(ranks), "ours": mine(ranks)}
    out: dict[str, Any] = {name: {"cpu": [], "wall": [], "loss": []} for name in sides}
    for number in range(warm_up + rounds):
        batch = batches(rank, ranks, number)
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            gc.collect()
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            loss = sides[name](batch)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            dist.barrier()
            if number >= warm_up:
                for key, value in (("cpu", cpu), ("wall", wall), ("loss", loss)):
                    out[name][key].append(value)
    return out


def measure_peak(rank: int, ranks: int, pair: str, side: str) -> int:
    """Most bytes that the CPU allocator held for one side, from before its model was built."""
    build = PAIRS[pair][1 if side == "theirs" else 2]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = build(ranks)
        for number in range(3):
            step(batches(rank, ranks, number))
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, num_bytes in memory:
        held += num_bytes
        peak = max(peak, held)
    return peak


def on_rank(
    rank: int, ranks: int, store: str, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    prepare(num_threads=1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    result = function(rank, ranks, *args)
    Path(folder, str(rank)).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def launch(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The function's result on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        torch.multiprocessing.spawn(on_rank, (ranks, store, folder, function, args), nprocs=ranks)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]


def summarise(results: list[Any]) -> dict[str, float]:
    """Medians over rounds of means over ranks; ratios are taken round by round."""
    rounds = range(len(results[0]["ours"]["cpu"]))
    figures = {}
    for kind in ("cpu", "wall"):
        mean = {
            side: [statistics.mean(rank[side][kind][i] for rank in results) for i in rounds]
            for side in ("ours", "theirs")
        }
        for side, values in mean.items():
            figures[f"{side}_{kind}_seconds"] = statistics.median(values)
        ratios = [own / other for own, other in zip(mean["ours"], mean["theirs"], strict=True)]
        figures[f"{kind}_ratio"] = statistics.median(ratios)
        figures[f"{kind}_ratio_low"], figures[f"{kind}_ratio_high"] = min(ratios), max(ratios)
    return figures


def hardware() -> dict[str, Any]:
    model = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    return {"cpu": model, "cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument(
        "--pairs", nargs="+", choices=list(PAIRS), default=[name for name in PAIRS if name not in ASKED_FOR]
    )
    parser.add_argument("--peak", action="store_true", help="peak bytes instead of time")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    command = f"python benchmarks/zero.py {' '.join(sys.argv[1:])}"
    report: dict[str, Any] = {
        "command": command,
        "hardware": hardware(),
        "ranks": asked.ranks,
        "rounds": asked.rounds,
        "pairs": {},
    }
    print(f"{asked.ranks} ranks, {hardware()}")
    for pair in asked.pairs:
        peer = PAIRS[pair][0]
        if asked.peak:
            peaks = {side: max(launch(asked.ranks, measure_peak, pair, side)) for side in ("ours", "theirs")}
            report["pairs"][pair] = {"peer": peer, **{f"{side}_peak_bytes": peak for side, peak in peaks.items()}}
            print(f"{pair}: ours {peaks['ours'] / 2**20:.0f} MiB, {peer} {peaks['theirs'] / 2**20:.0f} MiB")
            continue
        figures = summarise(launch(asked.ranks, measure_pair, pair, asked.rounds, asked.warm_up))
        report["pairs"][pair] = {"peer": peer, **figures}
        bar = BARS.get(asked.ranks, {}).get(pair)
        print(
            f"{pair}: CPU {figures['ours_cpu_seconds']:.3f} s, {peer} {figures['theirs_cpu_seconds']:.3f} s, "
            f"ratio {figures['cpu_ratio']:.3f} ({figures['cpu_ratio_low']:.3f} .. {figures['cpu_ratio_high']:.3f}"
            f"{f', bar {bar:.2f}' if bar else ''}), wall ratio {figures['wall_ratio']:.3f}",
            flush=True,
        )
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
