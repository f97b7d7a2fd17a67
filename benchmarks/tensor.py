"""Tensor parallelism beside PyTorch's own (DTensor, FSDP2 on top): CPU seconds of a training step.

    python benchmarks/tensor.py                       every pair, 5 rounds
    python benchmarks/tensor.py --pairs tp2           one of them
    python benchmarks/tensor.py --json FILE           the figures as JSON too

The step is that of `workload.py`, the clock and the figures those of `pairs.py`. The peer is the same decoder, its
linears parallelised by `parallelize_module` as PyTorch's tutorial does it, with `loss_parallel`; under sequence
parallel its norms hold a share of the tokens.

    tp2     2 ranks, tensor                           DTensor
    tp2sp   2 ranks, tensor and sequence              DTensor with SequenceParallel
    dp2tp2  4 ranks, dp 2 x tp 2, ZeRO-3, sequence    FSDP2 over DTensor with SequenceParallel
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pairs import Report, Seconds, Step, catalogue, launch, losses_told, parser, summarise, take_turns
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
from workload import ARCH, RATE, SEQUENCES, adamw, batch, plan_of

from meshwright.comm.mesh import Mesh
from meshwright.data.batch import Batch
from meshwright.layout.axes import Degrees
from meshwright.model import build_decoder, initialise, rows_to_torch
from meshwright.parallel.engine import Engine
from meshwright.plan.plan import Execution, Sharding


def ours(tp: int, sequence: bool, dp: int = 1, zero: int = 0) -> Callable[[], Step]:
    def build() -> Step:
        execution = Execution(sequence=sequence)
        plan = plan_of(Degrees(dp=dp, tp=tp), SEQUENCES // dp, Sharding(zero), execution=execution)
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
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)
            ),
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


PAIRS: dict[str, tuple[int, Callable[[], Step], Callable[[], Step]]] = {
    "tp2": (1, dtensor(2, False), ours(2, False)),
    "tp2sp": (1, dtensor(2, True), ours(2, True)),
    "dp2tp2": (2, dtensor(2, True, 2), ours(2, True, 2, 3)),
}
"""name -> (dp, theirs, ours), built on every rank."""


def measure_pair(rank: int, ranks: int, pair: str, rounds: int, warm_up: int) -> Seconds:
    dp, theirs, mine = PAIRS[pair]
    replica = rank // (ranks // dp)  # replicas outermost
    sides = {"theirs": theirs(), "ours": mine()}
    return take_turns(sides, lambda number: batch(number).part(replica, dp), rounds, warm_up)


def main() -> None:
    asked = parser("tensor", __doc__).parse_args()
    report = Report("tensor", asked)
    for pair in asked.pairs:
        ranks = catalogue("tensor")[pair]["ranks"][0]
        results = launch(ranks, measure_pair, pair, asked.rounds, asked.warm_up)
        losses = {side: results[0][side]["loss"][-1] for side in ("theirs", "ours")}
        report.pair(pair, ranks, {**summarise(results), "last_loss": losses}, losses_told(losses))


if __name__ == "__main__":
    main()
