"""Schedule slots, spelled out: what a stage computes, one unit and micro-batch at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.arch.tensors import UnitKind
from meshwright.config.choices import Recompute
from meshwright.plan.action import Action, Kind, Op, Phase
from meshwright.plan.plan import Plan
from meshwright.plan.schedules import ScheduleFunction, Slot, Work
from meshwright.plan.schedules.check import check_slots
from meshwright.plan.stages import virtual_of, virtual_stages


@dataclass(frozen=True, slots=True)
class Compute:
    """A compute action at its place in the step's order, and the buckets of its unit."""

    index: int
    action: Action
    needs_weights: bool
    writes_gradients: bool


@dataclass(frozen=True, slots=True)
class Slotted:
    """A slot of the schedule with its computes; `virtual` is the virtual stage it belongs to."""

    index: int
    slot: Slot
    virtual: int
    computes: tuple[Compute, ...]

    @property
    def unit(self) -> int:
        """The unit at which values enter."""
        return self.computes[0].action.unit


@lru_cache(maxsize=256)
def computes(plan: Plan, stage: int, kind: Kind, schedule: ScheduleFunction) -> tuple[Slotted, ...]:
    """Everything `stage` computes in a step, slot by slot: an evaluation is the forwards of a step, in its order.

    Raises ValueError where `schedule` gives anything but a schedule.
    """
    slots = schedule(stage, plan.degrees.pp, plan.accumulation, plan.pipeline.chunks)
    check_slots(slots, plan.accumulation, plan.pipeline.chunks)
    if kind is Kind.EVALUATE:
        slots = tuple(slot for slot in slots if slot.work is Work.FORWARD)
    out: list[Slotted] = []
    index = 0
    for slot in slots:
        virtual = virtual_of(plan, stage, slot.chunk)
        actions = _actions(plan, kind, slot, virtual_stages(plan)[virtual])
        listed = []
        for action in actions:
            listed.append(_compute(plan, index, action))
            index += 1
        out.append(Slotted(len(out), slot, virtual, tuple(listed)))
    return tuple(out)


def _actions(plan: Plan, kind: Kind, slot: Slot, units: tuple[int, ...]) -> list[Action]:
    train = kind is Kind.TRAIN
    if slot.work is Work.FORWARD:
        return [
            Action(Op.FORWARD, Phase.FORWARD, unit, slot.micro, keep=train and not _recomputed(plan, unit))
            for unit in units
        ]
    out: list[Action] = []
    for unit in reversed(units):
        if slot.work is Work.WEIGHT:
            out.append(Action(Op.WEIGHT, Phase.BACKWARD, unit, slot.micro))
            continue
        if _recomputed(plan, unit):
            out.append(Action(Op.RECOMPUTE, Phase.BACKWARD, unit, slot.micro))
        out.append(Action(Op.BACKWARD, Phase.BACKWARD, unit, slot.micro, split=slot.split))
    return out


def _recomputed(plan: Plan, unit: int) -> bool:
    """Blocks only: running the embedding again saves nothing, and the head's backward follows its forward."""
    return plan.execution.recompute is Recompute.FULL and plan.arch.unit_kind(unit) is UnitKind.BLOCK


def _compute(plan: Plan, index: int, action: Action) -> Compute:
    embedding = plan.arch.unit_kind(action.unit) is UnitKind.EMBEDDING
    backward = action.op is Op.BACKWARD
    return Compute(
        index,
        action,
        needs_weights=action.op is not Op.WEIGHT and not (backward and embedding),
        writes_gradients=action.op is Op.WEIGHT or (backward and not action.split),
    )
