"""The learning rate of a step: a pure function of the optimizer section, the only source of it.

peak ----------.
    /            `-.
   /                `--.
__/ warm-up             `-- floor ________
  0     w                  steps
"""

from __future__ import annotations

import math

from meshwright.config.choices import LearningRateSchedule
from meshwright.plan.plan import Optimizer


def learning_rate(optimizer: Optimizer, step: int) -> float:
    """The rate of optimizer step `step` (from 0): peak * (step + 1) / w in warm-up, the final value past the end."""
    peak, floor, warmup = optimizer.learning_rate, optimizer.min_learning_rate, optimizer.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if optimizer.schedule is LearningRateSchedule.CONSTANT:
        return peak
    span = optimizer.steps - warmup
    progress = min((step - warmup) / span, 1.0) if span > 0 else 1.0
    if optimizer.schedule is LearningRateSchedule.LINEAR:
        return floor + (peak - floor) * (1.0 - progress)
    return floor + (peak - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0
