"""Parameters under ZeRO-3: whole only while they are used.

For each compute that reads weights, in order: gather its buckets if they are not here and wait; launch the gather of
the next reader's buckets, so that it hides behind the compute; compute; release what the next reader does not need.
A compute that reads no weight (a weight product, the embedding's backward) holds nothing.
"""

from __future__ import annotations

from meshwright.plan.action import Action, Op, Phase
from meshwright.plan.buckets import by_unit, in_pieces, sharding_group, stage_buckets
from meshwright.plan.lowering.computes import Compute, Slotted
from meshwright.plan.lowering.listing import Listing
from meshwright.plan.plan import Plan


class Parameters:
    def __init__(self, plan: Plan, stage: int, slots: tuple[Slotted, ...]) -> None:
        self._plan = plan
        self._held = stage_buckets(plan, stage)
        self._groups = [sharding_group(plan, bucket.replicas) for bucket in self._held]
        self._of_unit = by_unit(bucket for bucket in self._held if in_pieces(plan, bucket))
        self._readers = [each for slot in slots for each in slot.computes if each.needs_weights]
        self._next = {a.index: b for a, b in zip(self._readers, self._readers[1:], strict=False)}
        self._last_use = {bucket: each.index for each in self._readers for bucket in self._of(each)}
        self._gathering: dict[int, int] = {}  # bucket -> index of its gather
        self._whole: set[int] = set()

    def before(self, out: Listing, compute: Compute) -> None:
        if not compute.needs_weights:
            return
        for bucket in self._of(compute):
            self._gather(out, bucket, compute.action.phase)
        for bucket in self._of(compute):
            out.wait(self._gathering.pop(bucket, -1))
            self._whole.add(bucket)
        following = self._next.get(compute.index)
        if following is not None:
            for bucket in self._of(following):
                self._gather(out, bucket, following.action.phase)

    def after(self, out: Listing, compute: Compute) -> None:
        if not compute.needs_weights:
            return
        following = self._next.get(compute.index)
        needed = self._of(following) if following is not None else ()
        for bucket in sorted(self._whole.difference(needed)):
            if self._plan.sharding.reshard_after_forward or self._last_use[bucket] == compute.index:
                out.add(Action(Op.RELEASE, compute.action.phase, bucket=bucket))
                self._whole.remove(bucket)

    def _of(self, compute: Compute) -> tuple[int, ...]:
        return self._of_unit.get(compute.action.unit, ())

    def _gather(self, out: Listing, index: int, phase: Phase) -> None:
        if index in self._whole or index in self._gathering:
            return
        self._gathering[index] = out.add(Action(Op.GATHER, phase, bucket=index, group=self._groups[index].name))
