"""A program told in English: one line an action, and what a rank is in the mesh.

rank 0 of 4: stage 0 of 2 (embedding, layer 0), 1 micro-batch of 1 sequence
  dense    ranks 0, 1     ...
     12  forward of micro-batch 0, layer 0
     13  send of the activation of micro-batch 0 to stage 1 (8192 bytes to rank 2)
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.counted import counted
from meshwright.layout.axes import Axis
from meshwright.plan.action import Action, Kind, Op
from meshwright.plan.buckets import Bucket, sharding_group
from meshwright.plan.folds.touches import sums
from meshwright.plan.folds.traffic import Operation, Transfer, transfer
from meshwright.plan.folds.words import in_words, units_in_words
from meshwright.plan.meeting import plan_groups
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program, program
from meshwright.plan.stages import stage_units


def narrate(plan: Plan, rank: int, kind: Kind = Kind.TRAIN) -> Iterator[str]:
    """One line an action of the step, numbered as reports number them."""
    steps = program(plan, rank, kind)
    width = len(str(len(steps.actions) - 1))
    for index, action in enumerate(steps.actions):
        yield f"{index:>{width}}  {sentence(plan, steps, action)}"


def sentence(plan: Plan, steps: Program, action: Action) -> str:
    """One action in one line, with what it sends and to whom."""
    text = in_words(plan, steps, action)
    if action.op is Op.FORWARD and not action.keep:
        text += ", keeping no graph"
    moved = transfer(plan, steps, action)
    return text if moved is None else f"{text} ({_moved(moved)})"


def describe_rank(plan: Plan, rank: int, kind: Kind = Kind.TRAIN) -> Iterator[str]:
    """What `rank` is: coordinates, peers in each group, units, buckets and what it keeps of them, links."""
    at = plan.degrees.coordinates(rank)
    place = ", ".join(f"{axis} {at.on(axis)} of {plan.degrees.on(axis)}" for axis in Axis if plan.degrees.on(axis) > 1)
    yield f"rank {rank} of {plan.degrees.ranks}{': ' + place if place else ''}"
    yield f"units: {units_in_words(plan.arch, stage_units(plan, at.pp))}"
    yield f"each step: {counted(plan.accumulation, 'micro-batch')} of {counted(plan.batch.micro, 'sequence')}"
    table = plan_groups(plan)
    shared = {name: group.members(plan.degrees, at) for name, group in table.items() if group.size > 1}
    for name, members in shared.items():
        if len(members) > 1:
            yield f"group {name}: ranks {', '.join(map(str, members))}"
    steps = program(plan, rank, kind)
    for bucket in steps.buckets:
        yield _bucket(plan, rank, bucket)
    for peer in sorted({action.peer for action in steps.actions if action.peer >= 0}):
        sent = sum(1 for action in steps.actions if action.op is Op.SEND and action.peer == peer)
        received = sum(1 for action in steps.actions if action.op is Op.RECEIVE and action.peer == peer)
        yield f"stage {peer}: {counted(sent, 'send')}, {counted(received, 'receive')} a step"


def _bucket(plan: Plan, rank: int, bucket: Bucket) -> str:
    """Which elements of a bucket the rank keeps, and over which groups its gradient is summed."""
    text = f"bucket {bucket.index}: {units_in_words(plan.arch, bucket.units)}, {bucket.numel} elements"
    group = sharding_group(plan, bucket.replicas)
    if plan.sharding.stage and group.size > 1:
        first, last = bucket.shard(group.size, group.place(plan.degrees, plan.degrees.coordinates(rank)))
        text += f", shard {first} to {last}"
    over = sums(plan, bucket)
    if over:
        text += f", summed over {', then '.join(over)}"
    return text if bucket.trainable else f"{text}, frozen"


def _moved(moved: Transfer) -> str:
    if moved.operation is Operation.SEND:
        return f"{moved.payload_bytes} bytes"
    return f"{moved.operation.value} of {moved.payload_bytes} bytes over {moved.group}, {moved.ranks} ranks"
