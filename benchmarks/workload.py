"""The training step that benchmarks compare: 8 layers, hidden 512, 8 heads, gated feed-forward of 1024, vocabulary 8192
untied, 29.4 million parameters in float32; 8 sequences of 128 tokens a step over all ranks; fused AdamW, no clipping.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.arch.arch import Arch
from meshwright.config.choices import LearningRateSchedule
from meshwright.data.batch import Batch
from meshwright.layout.axes import Degrees
from meshwright.layout.rows import whole_rows
from meshwright.plan import plan as plans
from meshwright.plan.rules import canonical

SEQUENCES, LENGTH, RATE = 8, 128, 3e-4
ARCH = Arch("llama", layers=8, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=1024, vocab=8192)
OPTIMIZER = plans.Optimizer(
    learning_rate=RATE, schedule=LearningRateSchedule.CONSTANT, warmup_steps=0, clip_norm=0.0,
    steps=0, min_learning_rate=0.0,
)  # fmt: skip


def plan_of(
    degrees: Degrees,
    micro: int,
    sharding: plans.Sharding | None = None,
    pipeline: plans.Pipeline | None = None,
    execution: plans.Execution | None = None,
    arch: Arch = ARCH,
) -> plans.Plan:
    """A step of this workload, or of another model, on a mesh, in micro-batches of `micro` sequences."""
    return canonical(
        plans.Plan(
            name="benchmark",
            seed=0,
            arch=arch,
            start=plans.Start(),
            data=plans.Data(sequence_length=LENGTH),
            batch=plans.Batch(SEQUENCES, micro),
            optimizer=OPTIMIZER,
            precision=plans.Precision(),
            degrees=degrees,
            sharding=sharding or plans.Sharding(),
            pipeline=pipeline or plans.Pipeline(stages=(arch.layers,)),
            context=plans.ContextSplit(),
            execution=execution or plans.Execution(),
        )
    )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, betas=OPTIMIZER.betas, weight_decay=0.1, fused=True)


def batch(number: int, arch: Arch = ARCH) -> Batch:
    """The whole batch of a round, random tokens of a model's vocabulary."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, arch.vocab, (SEQUENCES, LENGTH + 1), generator=generator).numpy()
    samples = torch.arange(SEQUENCES).numpy()
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), whole_rows(number, samples, LENGTH, None))
