"""Naive: one micro-batch at a time through all stages and back.

stage 0   F0 .  .  B0 F1 .  .  B1
stage 1   .  F0 B0 .  .  F1 B1 .        bubble (p - 1) / p
"""

from __future__ import annotations

from meshwright.plan.schedules.slot import Slot, Work


def slots(stage: int, stages: int, micros: int, chunks: int) -> tuple[Slot, ...]:
    """The slots of one stage, in order."""
    return tuple(Slot(work, 0, micro) for micro in range(micros) for work in (Work.FORWARD, Work.BACKWARD))
