"""Pipeline schedules as data: pure functions, one file each. A new schedule is one function and one line here."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.config.choices import Schedule
from meshwright.plan.schedules import gpipe, interleaved, naive, one_f_one_b, zb_h1, zb_v
from meshwright.plan.schedules.slot import Slot, Work

__all__ = ["SCHEDULES", "ScheduleFunction", "Slot", "Work"]

ScheduleFunction = Callable[[int, int, int, int], tuple[Slot, ...]]
"""(stage, stages, micro-batches, chunks) -> the slots of that stage, in order."""

SCHEDULES: dict[Schedule, ScheduleFunction] = {
    Schedule.NAIVE: naive.slots,
    Schedule.GPIPE: gpipe.slots,
    Schedule.ONE_F_ONE_B: one_f_one_b.slots,
    Schedule.INTERLEAVED: interleaved.slots,
    Schedule.ZB_H1: zb_h1.slots,
    Schedule.ZB_V: zb_v.slots,
}
