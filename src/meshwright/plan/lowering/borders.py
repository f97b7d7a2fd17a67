"""Borders between stages: activations travel forward, their cotangents back.

    at the start of a slot   post its receive and the next one due, then wait for its own
    at the end               wait for the channel's previous send, then send

Receives are posted one ahead, so each direction of each link has a communicator of its own: with a shared one the
wait-for graph has a cycle.
"""

from __future__ import annotations

from meshwright.layout.groups import GroupName
from meshwright.plan.action import Action, Op, Phase, What
from meshwright.plan.lowering.computes import Slotted
from meshwright.plan.lowering.listing import Listing
from meshwright.plan.plan import Plan
from meshwright.plan.schedules import Work
from meshwright.plan.stages import place


class Borders:
    def __init__(self, plan: Plan, stage: int, slots: tuple[Slotted, ...]) -> None:
        self._plan, self._stage = plan, stage
        self._receives = [slot for slot in slots if self._source(slot) is not None]
        self._posted: dict[int, int] = {}
        self._last_send: dict[tuple[int, What], int] = {}

    def before(self, out: Listing, slot: Slotted) -> None:
        if self._source(slot) is not None:
            self._post(out, slot)
        following = next((each for each in self._receives if each.index > slot.index), None)
        if following is not None:
            self._post(out, following)
        if slot.index in self._posted:
            out.wait(self._posted[slot.index])

    def after(self, out: Listing, slot: Slotted) -> None:
        peer = self._target(slot)
        if peer is None:
            return
        what = _carries(slot)
        if (peer, what) in self._last_send:
            out.wait(self._last_send[peer, what])
        unit = slot.computes[-1].action.unit
        self._last_send[peer, what] = out.add(_border(Op.SEND, slot, unit, what, peer))

    def finish(self, out: Listing) -> None:
        for index in self._last_send.values():
            out.wait(index)

    def _post(self, out: Listing, slot: Slotted) -> None:
        peer = self._source(slot)
        if slot.index not in self._posted and peer is not None:
            self._posted[slot.index] = out.add(_border(Op.RECEIVE, slot, slot.unit, _carries(slot), peer))

    def _source(self, slot: Slotted) -> int | None:
        """The other stage that what enters this slot comes from; None where it is here already."""
        return self._other(slot.virtual - 1 if slot.slot.work is Work.FORWARD else slot.virtual + 1, slot)

    def _target(self, slot: Slotted) -> int | None:
        return self._other(slot.virtual + 1 if slot.slot.work is Work.FORWARD else slot.virtual - 1, slot)

    def _other(self, virtual: int, slot: Slotted) -> int | None:
        if slot.slot.work is Work.WEIGHT or not 0 <= virtual < len(self._plan.pipeline.stages):
            return None
        stage = place(self._plan, virtual)[0]
        return stage if stage != self._stage else None


def _carries(slot: Slotted) -> What:
    return What.ACTIVATION if slot.slot.work is Work.FORWARD else What.COTANGENT


def _border(op: Op, slot: Slotted, unit: int, what: What, peer: int) -> Action:
    phase = Phase.FORWARD if what is What.ACTIVATION else Phase.BACKWARD
    return Action(op, phase, unit, slot.slot.micro, what=what, group=GroupName.PP, peer=peer)
