"""A schedule drawn as its file draws it: one column a slot of one unit of time, small letters in the second chunk."""

from __future__ import annotations

from meshwright.config.choices import Schedule
from meshwright.plan.schedules import SCHEDULES, Slot, Work
from meshwright.plan.stages import owner_of


def grid(schedule: Schedule, stages: int, micros: int, chunks: int = 1) -> list[str]:
    """One line a stage, every slot as early as what it needs."""
    lists = [SCHEDULES[schedule](stage, stages, micros, chunks) for stage in range(stages)]
    end: dict[tuple[Work, int, int], int] = {}
    rows: list[list[str]] = [[] for _ in range(stages)]
    virtual = {owner_of(schedule, stages, each): each for each in range(stages * chunks)}
    while any(len([w for w in row if w != ". "]) < len(slots) for row, slots in zip(rows, lists, strict=True)):
        moved = False
        for stage, slots in enumerate(lists):
            done = len([word for word in rows[stage] if word != ". "])
            if done == len(slots):
                continue
            slot = slots[done]
            needs = needed(slot, virtual[stage, slot.chunk], stages * chunks)
            if all(each in end for each in needs):
                start = max([len(rows[stage]), *(end[each] for each in needs)])
                rows[stage] += [". "] * (start - len(rows[stage])) + [word(slot)]
                end[slot.work, virtual[stage, slot.chunk], slot.micro] = start + 1
                moved = True
        assert moved, f"{schedule} hangs"
    width = max(map(len, rows))
    return [f"stage {stage}   {' '.join(row + ['. '] * (width - len(row)))}".rstrip() for stage, row in enumerate(rows)]


def needed(slot: Slot, virtual: int, last: int) -> list[tuple[Work, int, int]]:
    """What must have ended before a slot begins."""
    match slot.work:
        case Work.FORWARD:
            return [(Work.FORWARD, virtual - 1, slot.micro)] if virtual else []
        case Work.BACKWARD:
            after = [(Work.BACKWARD, virtual + 1, slot.micro)] if virtual + 1 < last else []
            return [(Work.FORWARD, virtual, slot.micro), *after]
        case Work.WEIGHT:
            return [(Work.BACKWARD, virtual, slot.micro)]


def word(slot: Slot) -> str:
    letter = slot.work.value if slot.chunk == 0 else slot.work.value.lower()
    return f"{letter}{slot.micro}"
