"""The loss scale of float16: gradients are computed larger, so that small ones do not become zero.

    forward    loss
    backward   starts at `value` instead of 1: every gradient is `value` times too large
    norm       of the sums, divided by `value`; an infinity or NaN among them on any rank is an overflow on all
    update     gradients times clip coefficient / value; after an overflow nothing is updated

Dynamic scaling of Micikevicius et al. 2018 (arXiv:1710.03740, section 3.2), with the constants of torch's GradScaler.
There is one scale in a run: it is halved and doubled by a decision that all ranks share, so it is equal on all.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config.choices import Dtype

START = 2.0**16
GROWTH_STEPS = 2000


@dataclass(slots=True)
class LossScale:
    """`value` multiplies the loss; `good_steps` counts updates since it last changed. Both are state of a run."""

    value: float = 1.0
    good_steps: int = 0
    dynamic: bool = False
    growth_steps: int = GROWTH_STEPS

    @property
    def may_fall(self) -> bool:
        """Whether a gradient that is not finite is blamed on the scale; at 1 it is the run's own fault."""
        return self.dynamic and self.value > 1.0

    def after_step(self, overflowed: bool) -> None:
        """Halve once after an overflow; double after `growth_steps` updates without one."""
        if not self.dynamic:
            return
        if overflowed:
            self.value, self.good_steps = max(self.value / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_steps:
            self.value, self.good_steps = self.value * 2, 0


def loss_scale_for(compute: Dtype) -> LossScale:
    """Float16 alone needs one: bfloat16 has the exponents of float32."""
    return LossScale(START, dynamic=True) if compute is Dtype.FLOAT16 else LossScale()
