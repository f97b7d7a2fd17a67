"""Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473, fig. 4 and section 2.2): several chunks of the model a
stage, so that a micro-batch passes every stage once a chunk and the first one fills the pipeline in smaller steps.

    two stages, two chunks (small letters: the second), four micro-batches

stage 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3
stage 1   .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 .

Micro-batches go in rounds of p: a round passes the first chunk, then the second, ..., and backward in turn. With v
chunks the bubble is (p - 1) / (v m + p - 1) where p divides m. Where it does not, the last round is laid out in full
and the micro-batches that are not there are left out: what remains waits for nothing else than before.
"""

from __future__ import annotations

from meshwright.plan.schedules.slot import Slot, Work


def slots(stage: int, stages: int, micros: int, chunks: int) -> tuple[Slot, ...]:
    """The slots of one stage, in order: warm-up forwards, then one forward and one backward in turn, then the rest."""
    rounds = range(0, micros, stages)
    order = [(chunk, first + i) for first in rounds for chunk in range(chunks) for i in range(stages)]
    forwards = [Slot(Work.FORWARD, chunk, micro) for chunk, micro in order]
    backwards = [Slot(Work.BACKWARD, chunks - 1 - chunk, micro) for chunk, micro in order]
    ahead = min(len(order), 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1)
    mixed = forwards[:ahead]
    for index, backward in enumerate(backwards):
        mixed.append(backward)
        mixed += forwards[index + ahead : index + ahead + 1]
    return tuple(slot for slot in mixed if slot.micro < micros)
