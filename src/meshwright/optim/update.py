"""One update rule over flat runs of elements.

A `Run` is a contiguous stretch of a bucket that is updated alike: its master values, its state, whether it decays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from meshwright.config.choices import OptimizerKind
from meshwright.plan.plan import Optimizer

_NORM_BLOCK = 1 << 17  # elements: their squares add up to 7 digits in float32


@dataclass(slots=True)
class Run:
    """`values` (k,) in the master dtype are updated in place; `state` holds as many (k,) tensors as the rule needs."""

    values: Tensor
    state: tuple[Tensor, ...]
    decays: bool
    step: Tensor
    """() float32: completed updates, kept beside the state because bias correction needs it."""


Rule = Callable[[Optimizer, Sequence[Run], Sequence[Tensor], float], None]
"""(settings, runs, their gradients, learning rate): updates the runs in place."""

STATE_NAMES: dict[OptimizerKind, tuple[str, ...]] = {
    OptimizerKind.ADAMW: ("exp_avg", "exp_avg_sq"),
    OptimizerKind.SGD: (),
}


def update_adamw(settings: Optimizer, runs: Sequence[Run], gradients: Sequence[Tensor], rate: float) -> None:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2) as torch.optim.AdamW, fused."""
    for decays in (True, False):
        chosen = [(run, grad) for run, grad in zip(runs, gradients, strict=True) if run.decays is decays]
        if not chosen:
            continue
        adamw(
            [run.values for run, _ in chosen],
            [grad for _, grad in chosen],
            [run.state[0] for run, _ in chosen],
            [run.state[1] for run, _ in chosen],
            [],
            [run.step for run, _ in chosen],
            fused=True,
            amsgrad=False,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            lr=rate,
            weight_decay=settings.weight_decay if decays else 0.0,
            eps=settings.eps,
            maximize=False,
        )


def update_sgd(settings: Optimizer, runs: Sequence[Run], gradients: Sequence[Tensor], rate: float) -> None:
    """Plain stochastic gradient descent: no momentum, no decay."""
    for run, grad in zip(runs, gradients, strict=True):
        run.values.add_(grad, alpha=-rate)
        run.step.add_(1)


RULES: dict[OptimizerKind, Rule] = {OptimizerKind.ADAMW: update_adamw, OptimizerKind.SGD: update_sgd}


def clip_coefficient(norm: float, clip_norm: float) -> float:
    """What gradients are multiplied by to have a norm of at most `clip_norm`, as torch's clip_grad_norm_; 0: off."""
    if clip_norm <= 0:
        return 1.0
    return min(1.0, clip_norm / (norm + 1e-6))


def squared_norm(values: Tensor) -> Tensor:
    """() float64: the sum of squares of a flat run, added up in at least float32.

    On the CPU block by block: torch's vector norm adds 30 million float32 squares 0.3 % wrong.
    """
    precise = torch.promote_types(values.dtype, torch.float32)
    if values.device.type != "cpu":
        norm: Tensor = torch.linalg.vector_norm(values, dtype=precise)
        return norm.double().square()
    blocks = (block.to(precise) for block in torch.split(values, _NORM_BLOCK))
    return torch.stack([torch.dot(block, block) for block in blocks]).double().sum()
