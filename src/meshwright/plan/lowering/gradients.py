"""Gradients: a bucket is summed after its last writer.

ZeRO 0, 1   after its last writer of the step: whole gradients accumulate over the micro-batches
ZeRO 2, 3   after its last writer of each micro-batch; the sum before it is ended first, so that at most two
            units' unreduced gradients exist, and no writer touches a bucket that travels
"""

from __future__ import annotations

from meshwright.plan.action import Action, Op, Phase, What
from meshwright.plan.buckets import by_unit, sharding_group, stage_buckets
from meshwright.plan.lowering.computes import Compute, Slotted
from meshwright.plan.lowering.listing import Listing
from meshwright.plan.plan import Plan


class Gradients:
    def __init__(self, plan: Plan, stage: int, slots: tuple[Slotted, ...]) -> None:
        held = stage_buckets(plan, stage)
        groups = {bucket.index: sharding_group(plan, bucket.replicas) for bucket in held}
        self._groups = {index: group.name for index, group in groups.items()}
        self._often = plan.sharding.stage >= 2
        self._of_unit = by_unit(bucket for bucket in held if bucket.trainable and groups[bucket.index].size > 1)
        self._last_writer: dict[tuple[int, int], int] = {}
        for slot in slots:
            for compute in slot.computes:
                for bucket in self._written(compute):
                    self._last_writer[self._turn(bucket, compute)] = compute.index
        self._pending: dict[int, int] = {}

    def before(self, out: Listing, compute: Compute) -> None:
        for bucket in self._written(compute):
            if bucket in self._pending:
                out.wait(self._pending.pop(bucket))

    def after(self, out: Listing, compute: Compute) -> None:
        complete = [
            bucket
            for bucket in self._written(compute)
            if self._last_writer[self._turn(bucket, compute)] == compute.index
        ]
        if self._often and complete:  # the sums of the unit before; those of one unit travel together
            for index in self._pending.values():
                out.wait(index)
            self._pending.clear()
        for bucket in complete:
            action = Action(Op.SUM, Phase.REDUCE, bucket=bucket, what=What.GRADIENT, group=self._groups[bucket])
            self._pending[bucket] = out.add(action)

    def _written(self, compute: Compute) -> tuple[int, ...]:
        """The buckets that `compute` writes gradients into and that others hold copies of."""
        return self._of_unit.get(compute.action.unit, ()) if compute.writes_gradients else ()

    def _turn(self, bucket: int, compute: Compute) -> tuple[int, int]:
        return bucket, compute.action.micro if self._often else 0
