"""What every action does to memory: the buffers it reads, frees, makes and adds to.

    value       enters a unit: from the unit before it, or received          (unit, micro-batch)
    cotangent   the gradient of what leaves a unit                           (unit, micro-batch)
    graph       what a forward keeps for its backward                        (unit, micro-batch)
    stash       what a split backward leaves for its weight products         (unit, micro-batch)
    parameters  a bucket's whole parameters                                  (bucket,)
    gradient    of a bucket, not yet summed                                  (bucket,)
    sum         what is left of it once summed: all of it, or a shard        (bucket,)
    summed      the fact that it was summed over one group                   (bucket, group)
    count, loss, norm                                                        ()

The buffers of a launch belong to it until its wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from meshwright.arch.tensors import UnitKind
from meshwright.layout.groups import GroupName
from meshwright.plan.action import Action, Kind, Op, What
from meshwright.plan.buckets import Bucket, by_unit, in_pieces, is_hybrid, sharding_group
from meshwright.plan.meeting import plan_groups
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program


class Kept(Enum):
    __hash__ = object.__hash__  # members are single objects; what Enum has is Python code, asked of every buffer

    VALUE = "value"
    COTANGENT = "cotangent"
    GRAPH = "graph"
    STASH = "stash"
    PARAMETERS = "parameters"
    GRADIENT = "gradient"
    SUM = "sum"
    SUMMED = "summed"
    COUNT = "count"
    LOSS = "loss"
    NORM = "norm"


@dataclass(frozen=True, slots=True)
class Buffer:
    what: Kept
    first: int = -1  # a unit or a bucket
    micro: int = -1
    group: GroupName | None = None

    def __str__(self) -> str:
        match self.what:
            case Kept.VALUE:
                return f"the value that enters unit {self.first}, micro-batch {self.micro}"
            case Kept.COTANGENT:
                return f"the cotangent of unit {self.first}, micro-batch {self.micro}"
            case Kept.GRAPH | Kept.STASH:
                return f"the {self.what.value} of unit {self.first}, micro-batch {self.micro}"
            case Kept.SUMMED:
                return f"the sum over {self.group} of bucket {self.first}"
            case Kept.PARAMETERS | Kept.GRADIENT | Kept.SUM:
                return f"the {self.what.value} of bucket {self.first}"
            case _:
                return f"the {self.what.value}"


@dataclass(frozen=True, slots=True)
class Touches:
    """`makes` must not exist before; `adds` may; `forbids` must not exist and stays so."""

    reads: tuple[Buffer, ...] = ()
    frees: tuple[Buffer, ...] = ()
    makes: tuple[Buffer, ...] = ()
    adds: tuple[Buffer, ...] = ()
    forbids: tuple[Buffer, ...] = ()


class Memory:
    """The touches of every action of one program."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self._plan, self._program = plan, program
        self._train = program.kind is Kind.TRAIN
        self._sums = tuple(sums(plan, bucket) for bucket in program.buckets)
        self._pieces = tuple(in_pieces(plan, bucket) for bucket in program.buckets)
        self._travels = tuple(sharding_group(plan, bucket.replicas).size > 1 for bucket in program.buckets)
        self._read = by_unit(program.buckets)
        self._of_bucket: dict[tuple[Op, int, GroupName | None], Touches] = {}

    def at_start(self) -> Iterator[Buffer]:
        """What exists before the first action."""
        yield Buffer(Kept.LOSS)
        for index, pieces in enumerate(self._pieces):
            if not pieces:
                yield Buffer(Kept.PARAMETERS, index)

    def may_remain(self, buffer: Buffer) -> bool:
        """Whether a step may end with `buffer`: figures, and parameters that are always whole."""
        if buffer.what is Kept.PARAMETERS:
            return not self._pieces[buffer.first]
        return buffer.what in _FIGURES

    def touches(self, action: Action) -> Touches:
        """What `action` does to memory; a wait does nothing of its own."""
        match action.op:
            case Op.FORWARD:
                return self._forward(action)
            case Op.RECOMPUTE:
                value = Buffer(Kept.VALUE, action.unit, action.micro)
                graph = Buffer(Kept.GRAPH, action.unit, action.micro)
                return Touches(self._parameters(action.unit), frees=(value,), makes=(graph,))
            case Op.BACKWARD:
                return self._backward(action)
            case Op.WEIGHT:
                stash = Buffer(Kept.STASH, action.unit, action.micro)
                return Touches(frees=(stash,), adds=self._gradients(action.unit), forbids=self._closed(action.unit))
            case Op.SEND | Op.RECEIVE:
                return self._border(action)
            case Op.COUNT:
                return Touches(makes=(Buffer(Kept.COUNT),))
            case Op.SUM if action.what is What.LOSS:
                return Touches(reads=(Buffer(Kept.LOSS),), makes=(Buffer(Kept.SUMMED, group=action.group),))
            case Op.WAIT:
                return Touches()
            case _:  # of a bucket: the same in every micro-batch
                key = action.op, action.bucket, action.group
                if key not in self._of_bucket:
                    self._of_bucket[key] = self._on_bucket(action)
                return self._of_bucket[key]

    def _forward(self, action: Action) -> Touches:
        unit, micro = action.unit, action.micro
        reads = self._parameters(unit)
        entering = () if unit == 0 else (Buffer(Kept.VALUE, unit, micro),)
        keeps = action.keep or not self._train
        graph = (Buffer(Kept.GRAPH, unit, micro),) if action.keep and self._train else ()
        if not keeps:
            reads += entering
        frees = entering if keeps else ()
        if unit != self._plan.arch.head_unit:
            return Touches(reads, frees, (Buffer(Kept.VALUE, unit + 1, micro), *graph))
        summed = tuple(Buffer(Kept.SUMMED, group=name) for name in (GroupName.TOKENS, GroupName.PP))
        return Touches((*reads, Buffer(Kept.COUNT)), frees, graph, (Buffer(Kept.LOSS),), summed)

    def _backward(self, action: Action) -> Touches:
        unit, micro = action.unit, action.micro
        kind = self._plan.arch.unit_kind(unit)
        frees: tuple[Buffer, ...] = (Buffer(Kept.GRAPH, unit, micro),)
        if kind is not UnitKind.HEAD:
            frees += (Buffer(Kept.COTANGENT, unit, micro),)
        makes = () if kind is UnitKind.EMBEDDING else (Buffer(Kept.COTANGENT, unit - 1, micro),)
        reads = () if kind is UnitKind.EMBEDDING else self._parameters(unit)
        if action.split:
            return Touches(reads, frees, (*makes, Buffer(Kept.STASH, unit, micro)))
        return Touches(reads, frees, makes, self._gradients(unit), self._closed(unit))

    def _border(self, action: Action) -> Touches:
        kept = Kept.VALUE if action.what is What.ACTIVATION else Kept.COTANGENT
        buffer = (Buffer(kept, action.arrives_at, action.micro),)
        return Touches(frees=buffer) if action.op is Op.SEND else Touches(makes=buffer)

    def _on_bucket(self, action: Action) -> Touches:
        index = action.bucket
        parameters = (Buffer(Kept.PARAMETERS, index),)
        match action.op:
            case Op.GATHER:
                return Touches(makes=parameters)
            case Op.RELEASE:
                return Touches(frees=parameters)
            case Op.PUBLISH:
                return Touches(reads=parameters)
            case Op.SUM:
                return self._sum(action)
            case Op.NORM:
                trained = [bucket.index for bucket in self._program.buckets if bucket.trainable]
                return Touches(
                    tuple(each for bucket in trained for each in self._ready(bucket)), makes=(Buffer(Kept.NORM),)
                )
            case _:
                reads = (Buffer(Kept.NORM), *self._ready(index))
                if self._pieces[index]:
                    return Touches(reads, frees=(self._left(index),), forbids=parameters)
                return Touches((*reads, *parameters), frees=(self._left(index),))

    def _sum(self, action: Action) -> Touches:
        index = action.bucket
        done = Buffer(Kept.SUMMED, index, group=action.group)
        if action.group is not sharding_group(self._plan, self._program.buckets[index].replicas).name:
            return Touches(reads=(self._left(index),), makes=(done,))
        gradient, left = (Buffer(Kept.GRADIENT, index),), (Buffer(Kept.SUM, index), done)
        often = self._plan.sharding.stage >= 2
        return Touches(frees=gradient, adds=left) if often else Touches(frees=gradient, makes=left)

    def _parameters(self, unit: int) -> tuple[Buffer, ...]:
        return tuple(Buffer(Kept.PARAMETERS, index) for index in self._read.get(unit, ()))

    def _gradients(self, unit: int) -> tuple[Buffer, ...]:
        return tuple(Buffer(Kept.GRADIENT, index) for index in self._written(unit))

    def _closed(self, unit: int) -> tuple[Buffer, ...]:
        """Sums that a gradient of `unit` would come too late for."""
        first = 1 if self._plan.sharding.stage >= 2 else 0
        late = [(index, name) for index in self._written(unit) for name in self._sums[index][first:]]
        return tuple(Buffer(Kept.SUMMED, index, group=name) for index, name in late)

    def _written(self, unit: int) -> list[int]:
        return [index for index in self._read.get(unit, ()) if self._program.buckets[index].trainable]

    def _left(self, index: int) -> Buffer:
        return Buffer(Kept.SUM if self._travels[index] else Kept.GRADIENT, index)

    def _ready(self, index: int) -> tuple[Buffer, ...]:
        """The gradient as norm and update need it: summed over every group that it is to be summed over."""
        return self._left(index), *(Buffer(Kept.SUMMED, index, group=name) for name in self._sums[index])


def sums(plan: Plan, bucket: Bucket) -> tuple[GroupName, ...]:
    """The groups over which the gradient of `bucket` is summed in a step, in order."""
    if not bucket.trainable:
        return ()
    table = plan_groups(plan)
    names = [sharding_group(plan, bucket.replicas).name]
    if is_hybrid(plan, bucket.replicas):
        names.append(GroupName.COPY)
    if bucket.tied_elsewhere:
        names.append(GroupName.TIED)
    names += bucket.partial
    return tuple(name for name in names if table[name].size > 1)


_FIGURES = frozenset({Kept.COUNT, Kept.LOSS, Kept.NORM, Kept.SUMMED})
