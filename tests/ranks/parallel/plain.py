"""The plain side of every comparison here: one process, the plain model, torch's own optimizer and clipping.

Also what both sides share: small float64 plans that differ only in layout, and their made-up global batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.arch.arch import Arch
from meshwright.config.choices import Dtype, OptimizerKind, Recompute
from meshwright.layout.axes import Degrees
from meshwright.model import build_decoder, initialise, rows_to_torch
from meshwright.plan.plan import (
    Batch,
    ContextSplit,
    Data,
    Execution,
    Optimizer,
    Pipeline,
    Plan,
    Precision,
    Sharding,
    Start,
)
from meshwright.plan.rules import canonical
from meshwright.verify.batches import global_batches

SEQUENCES, LENGTH, STEPS, RATE = 48, 8, 3, 0.05
DOUBLE = Precision(Dtype.FLOAT64, Dtype.FLOAT64, Dtype.FLOAT64)
ADAMW = Optimizer(learning_rate=RATE, eps=1e-3, clip_norm=0.5)
SGD = Optimizer(kind=OptimizerKind.SGD, learning_rate=RATE, weight_decay=0.0, clip_norm=0.5)
SMALL = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 128}
ODD = {"hidden": 6, "heads": 3, "kv_heads": 1, "head_dim": 2, "ffn": 7, "vocab": 57}
"""Sizes that no number of ranks divides: norm gains of 6, matrices of 42, an embedding of 342."""


@dataclass(frozen=True)
class Case:
    """A layout, and what is trained on it. `arch` replaces fields of SMALL."""

    name: str
    dp: int = 2
    zero: int = 0
    accumulation: int = 1
    within: int = 0
    reshard: bool = True
    bucket_bytes: int = 0
    tied: bool = False
    optimizer: Optimizer = ADAMW
    precision: Precision = DOUBLE
    execution: Execution = field(default_factory=Execution)
    arch: tuple[tuple[str, Any], ...] = ()

    @property
    def plan(self) -> Plan:
        sizes = {**SMALL, **dict(self.arch)}
        arch = Arch("llama", layers=sizes.pop("layers", 2), tie_embeddings=self.tied, **sizes)
        plan = Plan(
            name="tiny",
            seed=0,
            arch=arch,
            start=Start(),
            data=Data(sequence_length=LENGTH),
            batch=Batch(SEQUENCES, SEQUENCES // (self.dp * self.accumulation)),
            optimizer=self.optimizer,
            precision=self.precision,
            degrees=Degrees(dp=self.dp),
            sharding=Sharding(self.zero, self.within, self.reshard, self.bucket_bytes),
            pipeline=Pipeline(stages=(arch.layers,)),
            context=ContextSplit(),
            execution=self.execution,
        )
        return canonical(plan)


def full_recompute() -> Execution:
    return Execution(recompute=Recompute.FULL)


@dataclass
class Trained:
    """What `STEPS` steps of plain training were: one entry a step; tensors by name."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: list[dict[str, Tensor]]


def plain_training(plan: Plan, steps: int = STEPS) -> Trained:
    """Train the plan's model on one process, the whole global batch in one forward pass."""
    alone = replace(plan, degrees=Degrees(), sharding=Sharding(), execution=Execution())
    alone = replace(alone, batch=Batch(plan.batch.sequences, 1), pipeline=Pipeline(stages=(plan.arch.layers,)))
    return _plain_training(alone, steps)


@lru_cache(maxsize=16)
def _plain_training(plan: Plan, steps: int) -> Trained:
    model = build_decoder(plan.arch, dtype=torch.float64, device="cpu")
    initialise(model, plan.arch, plan.seed)
    optimizer = plain_optimizer(model, plan.optimizer)
    out = Trained([], [], [], [])
    for batch in global_batches(plan, steps):
        optimizer.zero_grad()
        rows = rows_to_torch(batch.rows, plan.arch, seed=plan.seed, dtype=torch.float64)
        count = torch.tensor(batch.trained_tokens)
        loss = model.loss(torch.from_numpy(batch.inputs), rows, torch.from_numpy(batch.labels), count)
        loss.backward()
        named = dict(model.named_parameters())
        out.gradients.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})
        limit = plan.optimizer.clip_norm or float("inf")
        out.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        out.losses.append(float(loss.detach()))
        out.weights.append({name: p.detach().clone() for name, p in named.items()})
    return out


def plain_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Torch's own; decay goes to tensors of two or more dimensions."""
    if settings.kind is OptimizerKind.SGD:
        return torch.optim.SGD(model.parameters(), lr=settings.learning_rate)
    decays = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decays, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps)
