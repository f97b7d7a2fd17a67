"""Memory of this project's own program: what its fold says, over as few micro-batches as tell.

F0  F1  F2  B0  F3  B1  F4  B2  F5  B3  B4  B5    1f1b, stage 1 of 3
fill    | rounds, all alike           | empty     a few are kept, and what rounds of one micro-batch a stage leave
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from meshwright.config.choices import Schedule
from meshwright.layout.axes import DEFAULT_ORDER, Coordinates
from meshwright.plan.action import Kind
from meshwright.plan.folds.memory import Timeline, memory
from meshwright.plan.folds.sizes import Sizes
from meshwright.plan.folds.traffic import Transport
from meshwright.plan.plan import Plan
from meshwright.plan.program import role_program
from meshwright.price.cluster import Cluster

__all__ = ["StageBytes", "folded", "fullest_moment", "may_be_fullest", "steady", "transport_of"]

_ROUNDS = 3  # micro-batches a stage: interleaved ones keep up to two when full, and as many come and go


class StageBytes(NamedTuple):
    """Of a rank of one stage: the largest sum of live bytes, and the largest of each category, whenever that is."""

    peak: int
    largest: Sizes


def steady(plan: Plan) -> Plan:
    """The plan with few micro-batches: more change no size. Where all forwards come first every one counts."""
    pp, micros = plan.degrees.pp, plan.accumulation
    if plan.pipeline.schedule is not Schedule.GPIPE:
        micros = min(micros, _ROUNDS * pp + micros % pp)
    sequences = micros * plan.batch.micro * plan.degrees.dp * plan.degrees.ep
    return replace(plan, batch=replace(plan.batch, sequences=sequences))


def folded(plan: Plan, cluster: Cluster, stages: Iterable[int]) -> tuple[StageBytes, ...]:
    """What some stages hold. How ranks are numbered decides on no size."""
    few = steady(plan)
    few = replace(few, degrees=replace(few.degrees, order=DEFAULT_ORDER))
    return tuple(_folded(few, stage, transport_of(cluster), _fuses(cluster)) for stage in stages)


def may_be_fullest(plan: Plan) -> list[int]:
    """Stages of which one holds most: of equally full ones the earlier, where no work is put off and chunks are not
    mixed."""
    pp, held = plan.degrees.pp, plan.pipeline.stages
    if plan.pipeline.schedule not in (Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.NAIVE):
        return list(range(pp))
    return sorted({0, min(1, pp - 1), max(range(pp), key=held.__getitem__), pp - 1})


def fullest_moment(plan: Plan, cluster: Cluster, stage: int) -> str:
    """The action at which a stage holds most, in words."""
    timeline = _timeline(plan, stage, transport_of(cluster), _fuses(cluster))
    if timeline.peak_index < 0:
        return f"stage {stage}, between steps"
    action = role_program(plan, stage, Kind.TRAIN).actions[timeline.peak_index]
    unit = plan.arch.unit_name(action.unit) if action.unit >= 0 else f"bucket {action.bucket}"
    micro = f" of micro-batch {action.micro}" if action.micro >= 0 else ""
    return f"stage {stage}, {action.op.value} of {unit}{micro}"


def transport_of(cluster: Cluster) -> Transport:
    """What moves the bytes on the devices of a cluster."""
    return Transport.DIRECT if cluster.device.is_cpu else Transport.NCCL


def _fuses(cluster: Cluster) -> bool:
    return not cluster.device.is_cpu


@lru_cache(maxsize=4096)
def _folded(plan: Plan, stage: int, transport: Transport, fused_norms: bool) -> StageBytes:
    timeline = _timeline(plan, stage, transport, fused_norms)
    return StageBytes(timeline.peak_bytes, timeline.largest)


def _timeline(plan: Plan, stage: int, transport: Transport, fused_norms: bool) -> Timeline:
    rank = plan.degrees.rank(Coordinates(pp=stage))
    return memory(plan, rank, transport=transport, fused_norms=fused_norms)
