"""GPipe (Huang et al. 2019, arXiv:1811.06965, fig. 2): all forwards, then all backwards.

stage 0   F0 F1 F2 .  .  B0 B1 B2
stage 1   .  F0 F1 F2 B0 B1 B2 .        bubble (p - 1) / (m + p - 1), m micro-batches in flight
"""

from __future__ import annotations

from meshwright.plan.schedules.slot import Slot, Work


def slots(stage: int, stages: int, micros: int, chunks: int) -> tuple[Slot, ...]:
    """The slots of one stage, in order."""
    forwards = tuple(Slot(Work.FORWARD, 0, micro) for micro in range(micros))
    return forwards + tuple(Slot(Work.BACKWARD, 0, micro) for micro in range(micros))
