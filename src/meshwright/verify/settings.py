"""What the ladder trains with, whatever the run says: settings under which a fault cannot hide.

SGD carries exactness: AdamW divides a constant factor in its gradient away. AdamW has a large epsilon, so that an
element whose gradient is almost 0 does not turn rounding into a step of full size. Clipping is at work in every step:
a wrong norm moves every weight.
"""

from __future__ import annotations

from meshwright.config.choices import Dtype, LearningRateSchedule, OptimizerKind
from meshwright.plan.plan import Optimizer, Precision
from meshwright.verify.trace import Kind

__all__ = ["CLIP_NORM", "DOUBLE", "OPTIMIZERS", "RATES", "STEPS", "compared_after", "optimizer_of"]

DOUBLE = Precision(Dtype.FLOAT64, Dtype.FLOAT64, Dtype.FLOAT64)
OPTIMIZERS = (OptimizerKind.SGD, OptimizerKind.ADAMW)
STEPS = 5  # with each of them
RATES = {OptimizerKind.SGD: 0.5, OptimizerKind.ADAMW: 1e-2}
CLIP_NORM = 0.25  # small models of these start values begin with norms of 0.5 to 5


def compared_after(steps: int) -> dict[int, Kind]:
    """Steps done -> as what weights are compared then, of a training of so many."""
    return {steps: Kind.LAST, 1: Kind.FIRST}


def optimizer_of(kind: OptimizerKind) -> Optimizer:
    """The optimizer of a rung, in canonical form."""
    adamw = kind is OptimizerKind.ADAMW
    return Optimizer(
        kind=kind,
        learning_rate=RATES[kind],
        schedule=LearningRateSchedule.CONSTANT,
        warmup_steps=0,
        min_learning_rate=0.0,
        betas=(0.9, 0.95) if adamw else (0.0, 0.0),
        eps=1e-3 if adamw else 0.0,
        weight_decay=0.1 if adamw else 0.0,
        clip_norm=CLIP_NORM,
        steps=0,
    )
