"""Tensor parallelism beside PyTorch's own (DTensor, FSDP2 on top): CPU seconds of a training step.

    python benchmarks/tensor.py                       every pair, 5 rounds
    python benchmarks/tensor.py --pairs tp2           one of them
    python benchmarks/tensor.py --json FILE           the figures as JSON too

Model, batch, clock and figures are those of `benchmarks/zero.py`: both sides of a pair in one launch, in turn. The
peer is the same decoder, its linears parallelised by `parallelize_module` as PyTorch's tutorial does it, with
`loss_parallel`; under sequence parallel its norms hold a share of the tokens.

    tp2     2 ranks, tensor                           DTensor
    tp2sp   2 ranks, tensor and sequence              DTensor with SequenceParallel
    dp2tp2  4 ranks, dp 2 x tp 2, ZeRO-3, sequence    FSDP2 over DTensor with SequenceParallel
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from zero import ARCH, LENGTH, OPTIMIZER, RATE, SEQUENCES, Step, adamw, hardware, launch, summarise

from meshwright.comm.mesh import Mesh
from meshwright.data.batch import Batch
from meshwright.layout.axes import Degrees
from meshwright.layout.rows import whole_rows
from meshwright.model import build_decoder, initialise, rows_to_torch
from meshwright.parallel.engine import Engine
from meshwright.plan import plan as plans
from meshwright.plan.rules import canonical


def ours(tp: int, sequence: bool, dp: int = 1, zero: int = 0) -> Callable[[], Step]:
    plan = canonical(
        plans.Plan(
            name="benchmark",
            seed=0,
            arch=ARCH,
            start=plans.Start(),
            data=plans.Data(sequence_length=LENGTH),
            batch=plans.Batch(SEQUENCES, SEQUENCES // dp),
            optimizer=OPTIMIZER,
            precision=plans.Precision(),
            degrees=Degrees(dp=dp, tp=tp),
            sharding=plans.Sharding(zero),
            pipeline=plans.Pipeline(stages=(ARCH.layers,)),
            context=plans.ContextSplit(),
            execution=plans.Execution(sequence=sequence),
        )
    )

    def build() -> Step:
        engine = Engine(plan, Mesh.of(plan).start())
        return lambda batch: engine.step(batch, RATE).loss

    return build


class Peer(nn.Module):
    """The plain decoder with torch's own embedding and projection, which `parallelize_module` knows."""

    def __init__(self) -> None:
        super().__init__()
        decoder = build_decoder(ARCH, dtype=torch.float32, device="cpu")
        initialise(decoder, ARCH, 0)
        self.tokens = nn.Embedding(ARCH.vocab, ARCH.hidden)
        self.layers, self.norm = decoder.layers, decoder.head.norm
        self.output = nn.Linear(ARCH.hidden, ARCH.vocab, bias=False)
        self.tokens.weight, self.output.weight = decoder.embedding.weight, decoder.head.weight

    def forward(self, tokens_BS: Tensor, rows: Any) -> Tensor:
        x_ND = self.tokens(tokens_BS.flatten())
        for block in self.layers:
            x_ND = block(x_ND, rows)
        logits_NV: Tensor = self.output(self.norm(x_ND))
        return logits_NV


def parallelise(peer: Peer, mesh: DeviceMesh, sequence: bool) -> None:
    stream = Shard(0) if sequence else Replicate()
    outer: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "output": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    inner: dict[str, Any] = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=stream),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=stream),
    }
    if sequence:
        outer["norm"] = SequenceParallel(sequence_dim=0)
        inner |= {
            "attention_norm": SequenceParallel(sequence_dim=0),
            "mlp_norm": SequenceParallel(sequence_dim=0),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)
            ),
            "mlp": PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
        }  # fmt: skip
    parallelize_module(peer, mesh, outer)
    for block in peer.layers:
        parallelize_module(block, mesh, inner)


def dtensor(tp: int, sequence: bool, dp: int = 1) -> Callable[[], Step]:
    def build() -> Step:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        peer = Peer()
        parallelise(peer, mesh["tp"], sequence)
        if dp > 1:
            for block in peer.layers:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(peer, mesh=mesh["dp"])
        # torch's fused AdamW takes distributed and plain parameters only apart
        parts = [[p for p in peer.parameters() if isinstance(p, DTensor) is cut] for cut in (True, False)]
        optimizer = adamw([{"params": part} for part in parts if part])

        def step(batch: Batch) -> float:
            optimizer.zero_grad()
            rows = rows_to_torch(batch.rows, ARCH)
            labels = torch.from_numpy(batch.labels).flatten()
            with loss_parallel():
                logits = peer(torch.from_numpy(batch.inputs), rows)
                loss = nn.functional.cross_entropy(logits, labels)
                loss.backward()
            optimizer.step()
            value = loss.detach()
            return float(value.full_tensor() if isinstance(value, DTensor) else value)

        return step

    return build


PAIRS: dict[str, tuple[int, int, str, Callable[[], Step], Callable[[], Step]]] = {
    "tp2": (2, 1, "DTensor", dtensor(2, False), ours(2, False)),
    "tp2sp": (2, 1, "DTensor with SequenceParallel", dtensor(2, True), ours(2, True)),
    "dp2tp2": (4, 2, "FSDP2 over DTensor", dtensor(2, True, 2), ours(2, True, 2, 3)),
}
"""name -> (ranks, dp, peer, theirs, ours)."""

BARS = {"tp2": 0.85, "tp2sp": 0.85, "dp2tp2": 0.80}
"""What the ratio of CPU seconds may be at most."""


def batches(rank: int, ranks: int, dp: int, number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, ARCH.vocab, (SEQUENCES, LENGTH + 1), generator=generator).numpy()
    samples = torch.arange(SEQUENCES).numpy()
    whole = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), whole_rows(number, samples, LENGTH, None))
    return whole.part(rank // (ranks // dp), dp)


def measure_pair(rank: int, ranks: int, pair: str, rounds: int, warm_up: int) -> dict[str, Any]:
    """CPU and wall seconds of every round on this rank."""
    _, dp, _, theirs, mine = PAIRS[pair]
    sides = {"theirs": theirs(), "ours": mine()}
    out: dict[str, Any] = {name: {"cpu": [], "wall": [], "loss": []} for name in sides}
    for number in range(warm_up + rounds):
        batch = batches(rank, ranks, dp, number)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    report: dict[str, Any] = {"hardware": hardware(), "rounds": asked.rounds, "pairs": {}}
    print(hardware())
    for pair in asked.pairs:
        ranks, _, peer, *_ = PAIRS[pair]
        results = launch(ranks, measure_pair, pair, asked.rounds, asked.warm_up)
        figures = summarise(results)
        losses = {side: results[0][side]["loss"][-1] for side in ("theirs", "ours")}
        report["pairs"][pair] = {"peer": peer, "ranks": ranks, **figures, "last_loss": losses}
        print(
            f"{pair}: CPU {figures['ours_cpu_seconds']:.3f} s, {peer} {figures['theirs_cpu_seconds']:.3f} s, "
            f"ratio {figures['cpu_ratio']:.3f} ({figures['cpu_ratio_low']:.3f} .. {figures['cpu_ratio_high']:.3f}, "
            f"bar {BARS[pair]:.2f}), wall ratio {figures['wall_ratio']:.3f}, "
            f"last loss {losses['ours']:.6f} / {losses['theirs']:.6f}",
            flush=True,
        )
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
