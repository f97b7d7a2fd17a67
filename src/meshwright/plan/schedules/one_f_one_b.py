"""1F1B (Narayanan et al. 2019, PipeDream; its flushing form in arXiv:2104.04473, fig. 4).

stage 0   F0 F1 .  B0 F2 B1 .  B2
stage 1   .  F0 B0 F1 B1 F2 B2 .        bubble (p - 1) / (m + p - 1), min(m, p - stage) micro-batches in flight
"""

from __future__ import annotations

from meshwright.plan.schedules.slot import Slot, Work


def slots(stage: int, stages: int, micros: int, chunks: int) -> tuple[Slot, ...]:
    """The slots of one stage, in order: warm-up forwards, then one forward and one backward in turn, then the rest."""
    ahead = min(micros, stages - stage)
    order = [Slot(Work.FORWARD, 0, micro) for micro in range(ahead)]
    for micro in range(micros):
        order.append(Slot(Work.BACKWARD, 0, micro))
        if micro + ahead < micros:
            order.append(Slot(Work.FORWARD, 0, micro + ahead))
    return tuple(order)
