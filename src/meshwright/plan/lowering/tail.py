"""What opens and closes a step.

count          the trained tokens of the global batch, known from the labels; nobody else divides
sum loss       over the ranks that saw different tokens, then over the stages
waits          of all gradient sums; then, on what is left, those over `copy` (hybrid sharding), `tied`, and the
               groups over which a gradient is a partial sum
norm           one packed sum over the world: squared norm, overflow and non-finite flags, stop
update         bucket by bucket
publish        ZeRO 1, 2: the updated parameters are gathered
"""

from __future__ import annotations

from meshwright.layout.groups import GroupName
from meshwright.plan.action import Action, Kind, Op, Phase, What
from meshwright.plan.buckets import Bucket, is_hybrid, sharding_group, stage_buckets
from meshwright.plan.lowering.listing import Listing
from meshwright.plan.meeting import plan_groups
from meshwright.plan.plan import Plan


def count_tokens(plan: Plan, out: Listing) -> None:
    """Open a step: nothing to add up where one rank holds all samples, but the count is still taken."""
    out.wait(out.add(Action(Op.COUNT, Phase.COUNT, group=_shared(plan, GroupName.BATCH))))


def close_step(plan: Plan, stage: int, kind: Kind, out: Listing) -> None:
    """Everything after the last compute."""
    _sum_loss(plan, out)
    if kind is Kind.EVALUATE:
        return
    out.wait_all(Op.SUM)
    trained = [bucket for bucket in stage_buckets(plan, stage) if bucket.trainable]
    _sum_remaining(plan, out, trained)
    out.wait(out.add(Action(Op.NORM, Phase.NORM, group=_shared(plan, GroupName.WORLD))))
    for bucket in trained:
        out.add(Action(Op.UPDATE, Phase.UPDATE, bucket=bucket.index))
        _publish(plan, out, bucket)
    out.wait_all()


def _sum_loss(plan: Plan, out: Listing) -> None:
    for name in (GroupName.TOKENS, GroupName.PP):
        group = _shared(plan, name)
        if group is not None:
            out.wait(out.add(Action(Op.SUM, Phase.COUNT, what=What.LOSS, group=group)))


def _sum_remaining(plan: Plan, out: Listing, trained: list[Bucket]) -> None:
    """Sums over groups that hold equal pieces: replicas of a shard, both stages of a tied tensor, tensor ranks."""
    copies = _shared(plan, GroupName.COPY)
    for bucket in trained:
        if copies is not None and is_hybrid(plan, bucket.replicas):
            out.add(Action(Op.SUM, Phase.REDUCE, bucket=bucket.index, what=What.GRADIENT, group=copies))
    out.wait_all(Op.SUM)
    for bucket in trained:
        if bucket.tied_elsewhere:
            out.add(Action(Op.SUM, Phase.REDUCE, bucket=bucket.index, what=What.GRADIENT, group=GroupName.TIED))
    out.wait_all(Op.SUM)
    for turn in range(max((len(bucket.partial) for bucket in trained), default=0)):
        for bucket in trained:
            for name in bucket.partial[turn : turn + 1]:
                out.add(Action(Op.SUM, Phase.REDUCE, bucket=bucket.index, what=What.GRADIENT, group=name))
        out.wait_all(Op.SUM)


def _publish(plan: Plan, out: Listing, bucket: Bucket) -> None:
    group = sharding_group(plan, bucket.replicas)
    if plan.sharding.stage in (1, 2) and group.size > 1:
        out.add(Action(Op.PUBLISH, Phase.UPDATE, bucket=bucket.index, group=group.name))


def _shared(plan: Plan, name: GroupName) -> GroupName | None:
    """The group, or None where a rank is alone in it."""
    return name if plan_groups(plan)[name].size > 1 else None
