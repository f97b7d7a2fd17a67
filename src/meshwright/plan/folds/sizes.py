"""How large each buffer of a program is: the figures of the memory fold (`memory.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshwright.arch.activations import Setting, kept_bytes
from meshwright.arch.arch import Arch
from meshwright.arch.passing import (
    Gradients,
    Moments,
    backward_passing,
    forward_passing,
    split_passing,
    stash_bytes,
    weight_passing,
)
from meshwright.config.choices import Dtype, Offload
from meshwright.layout.groups import GroupName
from meshwright.plan.action import Action, Op
from meshwright.plan.buckets import Bucket, in_pieces, sharding_group
from meshwright.plan.category import Category
from meshwright.plan.folds.setting import narrowed
from meshwright.plan.folds.touches import Buffer, Kept
from meshwright.plan.folds.traffic import border_elements
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program
from meshwright.plan.strategies.expert import Routed

__all__ = ["Sizes", "UnitSizes", "graph_sizes", "rows_bytes", "states", "visitors"]

Sizes = Mapping[Category, int]
"""Bytes by category."""


def states(plan: Plan, steps: Program) -> Sizes:
    """Bytes that live as long as the run: parameters (a shard at ZeRO-3), moments and master copies (from ZeRO-1).

    What is offloaded lives in other memory.
    """
    sizes = dict.fromkeys(Category, 0)
    offload = plan.execution.offload
    for bucket in steps.buckets:
        part = _shard(plan, bucket)
        cut = in_pieces(plan, bucket)
        kept = 0 if cut and offload is Offload.PARAMS else part if cut else bucket.numel
        sizes[Category.PARAMETERS] += kept * plan.precision.compute.num_bytes
        if bucket.trainable and offload is not Offload.OPTIMIZER:
            owned = part * plan.precision.master.num_bytes
            sizes[Category.OPTIMIZER] += plan.optimizer.num_moments * owned
            sizes[Category.MASTER] += owned if plan.precision.has_master else 0
    return sizes


def visitors(plan: Plan, bucket: Bucket) -> Sizes:
    """What of an offloaded bucket is on the device for its update."""
    owned = _shard(plan, bucket) * plan.precision.master.num_bytes
    match plan.execution.offload:
        case Offload.OPTIMIZER:
            masters = owned if plan.precision.has_master else 0
            return {Category.OPTIMIZER: plan.optimizer.num_moments * owned, Category.MASTER: masters}
        case Offload.PARAMS if in_pieces(plan, bucket) and not plan.precision.has_master:
            return {Category.PARAMETERS: owned}
        case _:
            return {}


class UnitSizes:
    """How large each buffer of a program is."""

    def __init__(self, plan: Plan, steps: Program, setting: Setting, routed: Routed | None) -> None:
        self._plan, self._buckets, self._setting, self._routed = plan, steps.buckets, setting, routed
        self._compute, self._reduce = plan.precision.compute.num_bytes, plan.precision.reduce.num_bytes
        self._arch = narrowed(plan.arch, plan.degrees.tp)
        self._in_place = not plan.execution.compile
        self.hidden = border_elements(plan) * self._compute
        self._graphs: dict[tuple[int, Setting], Sizes] = {}
        self._forwards: dict[tuple[int, bool, Setting], int] = {}
        self._backwards: dict[tuple[Op, int, bool, Setting], Moments] = {}
        self.rows = {Category.BUFFERS: rows_bytes(plan.arch, self._setting, plan.precision.compute)}

    def of(self, buffer: Buffer) -> Sizes:
        match buffer.what:
            case Kept.VALUE:
                return {Category.ACTIVATIONS: self.hidden}
            case Kept.COTANGENT:
                return {Category.BUFFERS: self.hidden}
            case Kept.GRAPH:
                return self._graph(buffer.first, self._setting_of(buffer.first, buffer.micro))
            case Kept.STASH:
                setting = self._setting_of(buffer.first, buffer.micro)
                stash = stash_bytes(self._arch, buffer.first, setting, self._plan.precision.compute)
                return {Category.ACTIVATIONS: stash}
            case Kept.PARAMETERS:
                return {Category.PARAMETERS: self._buckets[buffer.first].numel * self._compute}
            case Kept.GRADIENT:
                return {Category.GRADIENTS: self._buckets[buffer.first].numel * self._reduce}
            case Kept.SUM:
                bucket = self._buckets[buffer.first]
                left = _shard(self._plan, bucket) if self._plan.sharding.stage >= 2 else bucket.numel
                return {Category.GRADIENTS: left * self._reduce}
            case _:
                return {}

    def _setting_of(self, unit: int, micro: int) -> Setting:
        """Of one micro-batch, whose rows the experts of a unit get."""
        if self._routed is None or not self._plan.arch.is_routed_unit(unit):
            return self._setting
        return replace(self._setting, arriving=sum(self._routed[unit, micro].received))

    def _graph(self, unit: int, setting: Setting) -> Sizes:
        if (unit, setting) not in self._graphs:
            self._graphs[unit, setting] = graph_sizes(self._arch, unit, setting, self._plan.precision.compute)
        return self._graphs[unit, setting]

    def of_forward(self, action: Action) -> int:
        setting, keeps = self._setting_of(action.unit, action.micro), self._in_place and action.keep
        key = action.unit, keeps, setting  # a forward that keeps nothing lets its logits go
        if key not in self._forwards:
            compute = self._plan.precision.compute
            self._forwards[key] = forward_passing(self._arch, action.unit, setting, compute, keeps)
        return self._forwards[key]

    def of_backward(self, action: Action) -> Moments:
        key = action.op, action.unit, action.split, self._setting_of(action.unit, action.micro)
        if key not in self._backwards:
            self._backwards[key] = self._moments(*key)
        return self._backwards[key]

    def _moments(self, op: Op, unit: int, split: bool, setting: Setting) -> Moments:
        arch, compute = self._arch, self._plan.precision.compute
        if op is Op.WEIGHT:
            return weight_passing(arch, unit, setting, compute, self._gradients(unit))
        if split:
            return Moments(split_passing(arch, unit, setting, compute), 0)
        return backward_passing(arch, unit, setting, compute, self._gradients(unit))

    def written_first(self, gradients: Iterable[Buffer]) -> list[Buffer]:
        """Of a block with experts on an axis of their own: their gradients, or all others where some are shared."""
        assert self._plan.arch.experts is not None
        theirs = self._plan.arch.experts.shared == 0
        return [each for each in gradients if (self._buckets[each.first].replicas is GroupName.EXPERT) == theirs]

    def of_autograd(self, unit: int, buffer: Buffer) -> int:
        """Gradients of a unit that a bucket takes."""
        if buffer.what is not Kept.GRADIENT:
            return 0
        bucket = self._buckets[buffer.first]
        return sum(each.numel for each in bucket.segments if unit in each.owner.tensor.readers) * self._compute

    def of_update(self, action: Action) -> int:
        """Gradients on their way out of a bucket in the master's dtype."""
        precision = self._plan.precision
        if action.op is Op.UPDATE and precision.reduce is not precision.master:
            return _shard(self._plan, self._buckets[action.bucket]) * precision.master.num_bytes
        return 0

    def _gradients(self, unit: int) -> Gradients:
        segments = (each for b in self._buckets if unit in b.units and b.trainable for each in b.segments)
        own = sum(segment.numel for segment in segments) * self._compute
        return Gradients(self._in_place, self._reduce, own)


def rows_bytes(arch: Arch, setting: Setting, compute: Dtype) -> int:
    """Keys of dropout, rotary tables and masks of one micro-batch: there from its first unit on to its last."""
    alike = setting.sequences if setting.masked else 1
    tables = alike * setting.sequence * arch.head_dim * max(4, compute.num_bytes) if arch.rope is not None else 0
    windows = {arch.window(layer) for layer in range(arch.layers)}
    each = alike * setting.queries * setting.whole
    masks = sum(setting.masked or 0 < window < setting.whole for window in windows) * each
    return 8 * setting.tokens + tables + masks


def graph_sizes(arch: Arch, unit: int, setting: Setting, compute: Dtype) -> Sizes:
    """What a unit of a tensor rank keeps for its backward; `arch` is narrowed to that rank."""
    sizes = dict.fromkeys((Category.ACTIVATIONS, Category.LOGITS), 0)
    for name, size in kept_bytes(arch, unit, setting, compute).items():
        sizes[Category.LOGITS if name.startswith("loss.") else Category.ACTIVATIONS] += size
    return sizes


def _shard(plan: Plan, bucket: Bucket) -> int:
    """Elements of a bucket that a rank updates."""
    ways = sharding_group(plan, bucket.replicas).size if plan.sharding.stage else 1
    return bucket.numel // ways
