"""ZB-H1 (Qi et al. 2023, arXiv:2401.10241, fig. 3): 1F1B whose backward passes on the input's gradient first and does
the weight products when nobody waits for them.

    F forward    B backward of the input    W weight products

stage 0   F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
stage 1   .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
stage 2   .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

The weight products of stage s lag s micro-batches behind. At most p activations are held, as in 1F1B; the bubble is
(p - 1)(F + B - W) seconds: (p - 1) / (3 m + p - 1) of the step where the three take the same time and m >= p.
"""

from __future__ import annotations

from meshwright.plan.schedules.slot import Slot, Work


def slots(stage: int, stages: int, micros: int, chunks: int) -> tuple[Slot, ...]:
    """The slots of one stage, in order."""
    ahead = min(micros, stages - stage)
    order = [Slot(Work.FORWARD, 0, micro) for micro in range(ahead)]
    for micro in range(micros):
        order.append(Slot(Work.BACKWARD, 0, micro, split=True))
        if micro >= stage:
            order.append(Slot(Work.WEIGHT, 0, micro - stage))
        if micro + ahead < micros:
            order.append(Slot(Work.FORWARD, 0, micro + ahead))
    order += [Slot(Work.WEIGHT, 0, micro) for micro in range(max(0, micros - stage), micros)]
    return tuple(order)
