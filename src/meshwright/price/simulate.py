"""Simulating the very program: durations of its actions from the same compute and link models as the closed forms.

    compute     units of one layout, recomputation an action of its own; a split backward leaves its weight products
    transfers   operation and payload as the ledger has them, on the way of their group
    update      bytes of the bucket's shard

What runs beside a transfer is slowed by `overlap.slow` of the shorter of the two, as in the closed forms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from meshwright.arch.tensors import UnitKind
from meshwright.layout.axes import Coordinates
from meshwright.layout.groups import GroupName
from meshwright.plan.action import COMPUTE, Action, Op
from meshwright.plan.buckets import sharding_group
from meshwright.plan.folds.duration import step_seconds
from meshwright.plan.folds.graph import Streams, build_graph
from meshwright.plan.folds.simulate import Simulation, simulate
from meshwright.plan.folds.traffic import transfer
from meshwright.plan.meeting import plan_groups
from meshwright.plan.operation import Operation
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program
from meshwright.price.cluster import Cluster
from meshwright.price.compute import Units, straggling, units
from meshwright.price.layouts import Layouts, of_plan
from meshwright.price.links import Way, way
from meshwright.price.replicas import Replicas, replicas
from meshwright.price.target import Target, target_of
from meshwright.price.times import Block, block_seconds, border_seconds
from meshwright.price.weights import weights

__all__ = ["Clock", "simulated", "simulated_seconds"]

_WEIGHT_SHARE = 0.5  # of a backward's products


def simulated(plan: Plan, cluster: Cluster) -> Simulation:
    """The step of a plan, action by action, over one rank of every role."""
    return simulate(build_graph(plan, streams=Streams.COMMUNICATOR), Clock(plan, target_of(plan, cluster)))


def simulated_seconds(plan: Plan, cluster: Cluster) -> float:
    """How long that step lasts, in a fraction of the time."""
    return step_seconds(plan, Clock(plan, target_of(plan, cluster)))


@dataclass
class Clock:
    """Seconds of an action. What depends on a bucket or a group only is looked up once."""

    plan: Plan
    target: Target
    _ways: dict[GroupName, Way] = field(default_factory=dict)
    _seconds: dict[tuple[object, ...], float] = field(default_factory=dict)

    def __call__(self, program: Program, action: Action) -> float:
        key = (program.stage, *_timeless(action, self.plan.accumulation))
        if key not in self._seconds:
            self._seconds[key] = self._of(program, action)
        return self._seconds[key]

    def _of(self, program: Program, action: Action) -> float:
        if action.op in COMPUTE:
            return self._compute(action)
        if action.op is Op.UPDATE:
            return self._update(program, action)
        if action.op in (Op.RECEIVE, Op.SEND):  # whichever end is asked: the message is the same
            return self._border
        moved = transfer(self.plan, program, action)
        if moved is None or action.group is None:
            return 0.0
        path = self._way(action.group)
        if moved.operation is Operation.ALL_REDUCE:
            return float(path.all_reduce(moved.payload_bytes)[0])
        return float(path.gather(moved.payload_bytes)[0])

    @cached_property
    def _layouts(self) -> Layouts:
        return of_plan(self.plan)

    @cached_property
    def _units(self) -> Units:
        return units(self.target, self._layouts).slowed(1 + straggling(self.target, self._layouts))

    @cached_property
    def _replicas(self) -> Replicas:
        return replicas(self.target, self._layouts, weights(self.target, self._layouts))

    @cached_property
    def _block(self) -> Block:
        return block_seconds(self.target, self._layouts, self._units, self._replicas)

    def _compute(self, action: Action) -> float:
        own, given, block = self._units, self._units.exchanged, self._block
        kind = self.plan.arch.unit_kind(action.unit)
        ahead = action.op in (Op.FORWARD, Op.RECOMPUTE)
        if kind is UnitKind.EMBEDDING:
            seconds = (own.embedding_forward if ahead else own.embedding_backward) + given.tp_outer / 2
        elif kind is UnitKind.HEAD:
            seconds = own.head_forward + given.tp_head if ahead else own.head_backward + given.tp_outer / 2
        elif ahead:
            seconds = block.front + (self._beside(action, block) if action.op is Op.FORWARD else -block.host / 3)
        else:
            seconds = block.behind + self._beside(action, block)
        return float(seconds[0]) * self._part(action, kind)

    def _beside(self, action: Action, block: Block) -> np.ndarray:
        """What communicating at the same time costs."""
        slow = self.target.values["overlap.slow"]
        if action.op is Op.FORWARD:
            return slow * np.minimum(self._replicas.forward, block.front)
        beside = self._replicas.backward
        if action.micro == self.plan.accumulation - 1:
            beside = beside + self._replicas.block.sum
        return slow * np.minimum(beside, block.behind)

    def _part(self, action: Action, kind: UnitKind) -> float:
        if kind is UnitKind.EMBEDDING or not (action.split or action.op is Op.WEIGHT):
            return 0.0 if action.split else 1.0
        return _WEIGHT_SHARE if action.op is Op.WEIGHT else 1 - _WEIGHT_SHARE

    def _update(self, program: Program, action: Action) -> float:
        bucket = program.buckets[action.bucket]
        ways = sharding_group(self.plan, bucket.replicas).size if self.plan.sharding.stage else 1
        owned = bucket.numel / ways
        return float(self.target.update_seconds(owned, bucket.numel if self.plan.sharding.stage < 2 else owned))

    @cached_property
    def _border(self) -> float:
        return float(border_seconds(self.target.literal, self._layouts)[0])

    def _way(self, name: GroupName) -> Way:
        if name not in self._ways:
            size = np.array([float(plan_groups(self.plan)[name].size)])
            self._ways[name] = way(self.target, size, self._stride(name))
        return self._ways[name]

    def _stride(self, name: GroupName) -> np.ndarray:
        members = plan_groups(self.plan)[name].members(self.plan.degrees, Coordinates())
        return np.array([float(members[1] - members[0]) if len(members) > 1 else 1.0])


def _timeless(action: Action, accumulation: int) -> tuple[object, ...]:
    """What decides how long an action lasts: its micro-batch only in so far as it is the last."""
    return (
        action.op,
        action.unit,
        action.bucket,
        action.what,
        action.group,
        action.split,
        action.micro == accumulation - 1,
    )
