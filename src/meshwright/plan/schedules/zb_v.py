"""ZB-V (Qi et al. 2023, arXiv:2401.10241, fig. 6): two chunks a stage, laid out as a V, and weight products apart.

    forward      stage 0 -> 1 -> ... -> p-1     first chunk (0)
                 stage 0 <- 1 <- ... <- p-1     second chunk (1), on the same stage where it turns

    two stages, three micro-batches; small letters: the second chunk

stage 0   F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2 B1 W1 B2 W2 .
stage 1   .  F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 W2

A micro-batch comes back to the stage that it left from, so the first backward starts after one passage down and up. No
stage waits between its first and its last slot where the three parts take the same time and m >= 2 p - 1; the stages
start one slot after another, which is (p - 1) / (6 m + p - 1) of the step. At most 2 p activations of chunks are held,
the same memory as in 1F1B. Fewer micro-batches are laid out as 2 p - 1, and those that are not there left out.
"""

from __future__ import annotations

from collections import defaultdict

from meshwright.plan.schedules.slot import Slot, Work


def slots(stage: int, stages: int, micros: int, chunks: int) -> tuple[Slot, ...]:
    """The slots of one stage, in order: each phase repeats its words, and every word takes its next micro-batch."""
    after = stages - stage  # stages from this one on
    phases = (
        ("F0", 2 * after - 1),  # down
        ("F1 F0", stage),  # what went down comes back up
        ("F1 B1 W1", after),  # the first backwards, whose forwards end at the head
        ("F0 B0 W0 F1 B1 W1", max(micros, 2 * stages - 1) - stages),
        ("B0 B1", stage),  # nothing left to send forward: gradients first
        ("B0 W0", after),
        ("W1", stage),
        ("W0", stage),
    )
    done: dict[str, int] = defaultdict(int)
    order = []
    for words, times in phases:
        for word in words.split() * times:
            work = Work(word[0])
            order.append(Slot(work, int(word[1]), done[word], split=work is Work.BACKWARD))
            done[word] += 1
    return tuple(slot for slot in order if slot.micro < micros)
