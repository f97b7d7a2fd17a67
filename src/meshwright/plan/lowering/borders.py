"""Borders between stages: activations travel forward, their cotangents back.

    at the start of a slot   post its receive and the next one due
    before it is needed      wait for its own: a recomputation ahead of a backward needs none
    at the end               wait for the channel's previous send, then send

Receives are posted one ahead, so each direction of each link has a communicator of its own: with a shared one the
wait-for graph has a cycle. A link delivers in the order sent, so receives are posted in the order in which the other
end sends, even where this stage needs them in another one:

    stage 0 sends   a0 a1 c0 a2      a: activation, c: cotangent (of another chunk)
    stage 1 needs   a0 c0 a1 a2      at c0 it posts a1 and c0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from meshwright.layout.groups import GroupName
from meshwright.plan.action import Action, Op, Phase, What
from meshwright.plan.lowering.computes import Compute, Slotted
from meshwright.plan.lowering.listing import Listing
from meshwright.plan.plan import Plan
from meshwright.plan.schedules import Work
from meshwright.plan.stages import place


class _Message(NamedTuple):
    """What crosses a border, by the virtual stage it goes to."""

    what: What
    virtual: int
    micro: int


class Borders:
    """`slots_of` gives the slots of any stage: what the others send, and when, follows from theirs."""

    def __init__(self, plan: Plan, stage: int, slots_of: Callable[[int], tuple[Slotted, ...]]) -> None:
        self._plan, self._stage = plan, stage
        entered = [(slot, message) for slot in slots_of(stage) if (message := self._entering(slot))]
        self._needs = {slot.index: message for slot, message in entered}
        self._slot_of = {message: slot for slot, message in entered}
        self._next = self._following(slots_of(stage))
        self._peer: dict[_Message, int] = {}
        self._due: dict[int, list[_Message]] = {}  # by peer, in its order of sending; posted ones are taken away
        for peer in sorted({self._stage_of(slot.virtual + _back(message.what)) for slot, message in entered}):
            self._due[peer] = [each for slot in slots_of(peer) if (each := self._leaving(slot)) in self._slot_of]
            self._peer |= dict.fromkeys(self._due[peer], peer)
            self._due[peer].reverse()
        self._posted: dict[_Message, int] = {}
        self._last_send: dict[tuple[int, What], int] = {}

    def before(self, out: Listing, slot: Slotted) -> None:
        needed, following = self._needs.get(slot.index), self._next.get(slot.index)
        for message in (needed, following):
            if message is not None:
                self._post(out, message)

    def needed(self, out: Listing, slot: Slotted, compute: Compute) -> None:
        """Right before a compute of `slot`: what the slot received must be here by its first use."""
        message = self._needs.get(slot.index)
        if message is not None and compute.action.op is not Op.RECOMPUTE:
            out.wait(self._posted[message])

    def after(self, out: Listing, slot: Slotted) -> None:
        message = self._leaving(slot)
        if message is None:
            return
        channel = self._stage_of(message.virtual), message.what
        if channel in self._last_send:
            out.wait(self._last_send[channel])
        unit = slot.computes[-1].action.unit
        self._last_send[channel] = out.add(_border(Op.SEND, unit, message, channel[0]))

    def finish(self, out: Listing) -> None:
        for index in self._last_send.values():
            out.wait(index)

    def _post(self, out: Listing, message: _Message) -> None:
        """Post everything that arrives on the link up to `message`."""
        peer = self._peer[message]
        while message not in self._posted:
            each = self._due[peer].pop()
            self._posted[each] = out.add(_border(Op.RECEIVE, self._slot_of[each].unit, each, peer))

    def _following(self, slots: tuple[Slotted, ...]) -> dict[int, _Message]:
        """Slot -> what the next slot after it that receives anything will need."""
        out: dict[int, _Message] = {}
        following = None
        for slot in reversed(slots):
            if following is not None:
                out[slot.index] = following
            following = self._needs.get(slot.index, following)
        return out

    def _entering(self, slot: Slotted) -> _Message | None:
        """What a slot needs from another stage."""
        if slot.slot.work is Work.WEIGHT:
            return None
        what = _carries(slot)
        crosses = self._crosses(slot.virtual + _back(what), slot.virtual)
        return _Message(what, slot.virtual, slot.slot.micro) if crosses else None

    def _leaving(self, slot: Slotted) -> _Message | None:
        """What a slot, of any stage, gives to another stage."""
        if slot.slot.work is Work.WEIGHT:
            return None
        what = _carries(slot)
        target = slot.virtual - _back(what)
        return _Message(what, target, slot.slot.micro) if self._crosses(slot.virtual, target) else None

    def _crosses(self, source: int, target: int) -> bool:
        inside = range(len(self._plan.pipeline.stages))
        return source in inside and target in inside and self._stage_of(source) != self._stage_of(target)

    def _stage_of(self, virtual: int) -> int:
        return place(self._plan, virtual)[0]


def _carries(slot: Slotted) -> What:
    return What.ACTIVATION if slot.slot.work is Work.FORWARD else What.COTANGENT


def _back(what: What) -> int:
    """From the virtual stage that `what` enters to the one that it comes from."""
    return -1 if what is What.ACTIVATION else 1


def _border(op: Op, unit: int, message: _Message, peer: int) -> Action:
    phase = Phase.FORWARD if message.what is What.ACTIVATION else Phase.BACKWARD
    return Action(op, phase, unit, message.micro, what=message.what, group=GroupName.PP, peer=peer)
