"""What makes a list of slots a schedule of one stage, and how much it keeps.

Whether the stages together can come to an end is not seen here: that is read off the wait-for graph of their programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from meshwright.plan.schedules.slot import Slot, Work


def check_slots(slots: Sequence[Slot], micros: int, chunks: int) -> None:
    """Every micro-batch passes every chunk once forward and once back, a split backward's weight products after it.

    Raises ValueError naming every slot that is missing, repeated, unknown or too early.
    """
    problems = list(_problems(slots, micros, chunks))
    if problems:
        raise ValueError(f"not a schedule of {micros} micro-batches over {chunks} chunks: {'; '.join(problems)}")


def most_in_flight(slots: Sequence[Slot]) -> int:
    """The most (chunk, micro-batch) whose forward was done and whose last part was not: what holds activations."""
    split = {(slot.chunk, slot.micro) for slot in slots if slot.work is Work.WEIGHT}
    flying = most = 0
    for slot in slots:
        ends = slot.work is (Work.WEIGHT if (slot.chunk, slot.micro) in split else Work.BACKWARD)
        flying += (slot.work is Work.FORWARD) - ends
        most = max(most, flying)
    return most


def _problems(slots: Sequence[Slot], micros: int, chunks: int) -> Iterator[str]:
    split = {(slot.chunk, slot.micro) for slot in slots if slot.work is Work.BACKWARD and slot.split}
    found = Counter((slot.work, slot.chunk, slot.micro) for slot in slots)
    everything = [(chunk, micro) for chunk in range(chunks) for micro in range(micros)]
    wanted = {(work, *each) for work in (Work.FORWARD, Work.BACKWARD) for each in everything}
    wanted |= {(Work.WEIGHT, *each) for each in split}
    for key in sorted(wanted | found.keys(), key=str):
        if key not in wanted:
            yield f"{_named(*key)} belongs to nothing"
        elif found[key] != 1:
            yield f"{_named(*key)} stands {found[key]} times"
    place = {(slot.work, slot.chunk, slot.micro): index for index, slot in enumerate(slots)}
    for earlier, later in ((Work.FORWARD, Work.BACKWARD), (Work.BACKWARD, Work.WEIGHT)):
        for each in everything:
            if place.get((later, *each), len(slots)) < place.get((earlier, *each), -1):
                yield f"{_named(later, *each)} stands before {_named(earlier, *each)}"


def _named(work: Work, chunk: int, micro: int) -> str:
    return f"{work.value} of micro-batch {micro}, chunk {chunk}"
