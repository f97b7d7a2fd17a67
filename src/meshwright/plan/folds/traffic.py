"""What an action sends: the one place where an action becomes a collective with a size.

| action               | operation      | payload                                                           |
|----------------------|----------------|-------------------------------------------------------------------|
| count                | all_reduce     | one int64                                                         |
| sum of the loss      | all_reduce     | one float64                                                       |
| norm                 | all_reduce     | the packed vector, float64 (`plan/norm.py`)                       |
| sum, stage 0         | all_reduce     | the bucket, reduce dtype                                          |
| sum, stage 1 .. 3    | reduce_scatter | the bucket, reduce dtype                                          |
| sum over copy, tied, | all_reduce     | what the sum before left: the bucket (stage 0) or the rank's shard |
|   tp, kv_copy        |                |                                                                   |
| gather, publish      | all_gather     | the bucket, compute dtype                                         |
| send                 | send           | a micro-batch of hidden states or of their cotangents             |
| computes             | as declared    | what the strategies of the unit declare                           |

A receive sends nothing and is no traffic of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from meshwright.layout.groups import GroupName
from meshwright.plan.action import Action, Op, Phase, What
from meshwright.plan.buckets import Bucket, sharding_group
from meshwright.plan.meeting import plan_groups
from meshwright.plan.norm import norm_floats
from meshwright.plan.operation import Operation as Operation
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program
from meshwright.plan.strategies.calls import unit_calls
from meshwright.plan.strategies.expert import Exchange
from meshwright.plan.strategies.tensor import stream_tokens

SCALAR_BYTES = 8  # the count is an int64; loss and norm are float64


class Transport(Enum):
    """What moves the bytes.

    GLOO    gloo's own collectives: rings, but its reduce-scatter moves what an all-reduce moves
    DIRECT  every rank sends each other rank that rank's shard, point to point; an all-reduce stays a ring. Ranks of one
            machine may read as many bytes of parameters where they lie instead (`comm/shared.py`)
    NCCL    rings
    """

    GLOO = "gloo"
    DIRECT = "direct"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One call of a collective, or one send, by one rank.

    `payload_bytes`: the whole tensor for all-gather, reduce-scatter and all-reduce; the message for a send; the send
    buffer for an all-to-all. `leaving_bytes`: what of that buffer goes to others, where runs are not alike.
    """

    group: GroupName
    ranks: int
    operation: Operation
    phase: Phase
    payload_bytes: int
    leaving_bytes: int | None = None

    def wire_bytes(self, transport: Transport) -> int:
        """What this rank moves to others."""
        if self.leaving_bytes is not None:
            return self.leaving_bytes
        return wire_bytes(transport, self.operation, self.payload_bytes, self.ranks)


def sent_bytes(operation: Operation, payload_bytes: int, ranks: int) -> int:
    """What the operation makes one of `ranks` ranks send on a ring (Patarasuk and Yuan 2009), rounded down."""
    match operation:
        case Operation.SEND | Operation.BROADCAST:
            return payload_bytes
        case Operation.ALL_REDUCE:
            return 2 * (ranks - 1) * payload_bytes // ranks
        case _:
            return (ranks - 1) * payload_bytes // ranks


def wire_bytes(transport: Transport, operation: Operation, payload_bytes: int, ranks: int) -> int:
    """What one rank moves to others by the algorithm used, rounded down: on the wire, or from memory to memory."""
    if transport is Transport.GLOO and operation is Operation.REDUCE_SCATTER:
        operation = Operation.ALL_REDUCE
    return sent_bytes(operation, payload_bytes, ranks)


def transfer(plan: Plan, program: Program, action: Action) -> Transfer | None:
    """What `action` sends when it is launched; None where it launches nothing, or only receives."""
    if not action.launches or action.group is None or action.op is Op.RECEIVE:
        return None
    ranks = plan_groups(plan)[action.group].size
    operation, payload = _operation(plan, program, action)
    return Transfer(action.group.reported, ranks, operation, action.phase, payload)


def transfers(plan: Plan, program: Program, action: Action, exchange: Exchange | None = None) -> Iterator[Transfer]:
    """Everything that `action` sends: its own launch, and what its unit sends, experts' rows by `exchange`."""
    launched = transfer(plan, program, action)
    if launched is not None:
        yield launched
    for call in unit_calls(plan, action, program.kind, exchange):
        ranks = plan_groups(plan)[call.group].size
        payload, leaving = call.payload_bytes, call.leaving_bytes
        yield Transfer(call.group.reported, ranks, call.operation, action.phase, payload, leaving)


def border_elements(plan: Plan) -> int:
    """Elements of what crosses a border between stages: micro-batch x tokens held x hidden."""
    return stream_tokens(plan) * plan.arch.hidden


def _operation(plan: Plan, program: Program, action: Action) -> tuple[Operation, int]:
    """The operation and its payload in bytes."""
    match action.op:
        case Op.COUNT:
            return Operation.ALL_REDUCE, SCALAR_BYTES
        case Op.NORM:
            return Operation.ALL_REDUCE, norm_floats(plan) * SCALAR_BYTES
        case Op.SEND:
            return Operation.SEND, border_elements(plan) * plan.precision.sent_bytes
        case Op.GATHER | Op.PUBLISH:
            return Operation.ALL_GATHER, program.buckets[action.bucket].numel * plan.precision.sent_bytes
        case Op.SUM if action.what is What.LOSS:
            return Operation.ALL_REDUCE, SCALAR_BYTES
        case Op.SUM:
            return _sum(plan, program.buckets[action.bucket], action)
        case _:
            raise ValueError(f"{action.op.value} sends nothing")


def _sum(plan: Plan, bucket: Bucket, action: Action) -> tuple[Operation, int]:
    over = sharding_group(plan, bucket.replicas)
    width = plan.precision.reduce.num_bytes
    if not plan.sharding.stage:
        return Operation.ALL_REDUCE, bucket.numel * width
    if action.group is over.name:
        return Operation.REDUCE_SCATTER, bucket.numel * width
    return Operation.ALL_REDUCE, bucket.numel // over.size * width  # the shard that the scatter left
