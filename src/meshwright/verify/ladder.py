"""The rungs: from one process over each axis and feature alone, and pairs of them, to the whole run.

                            whole run
              dp + zero   dp + accumulation   zero + accumulation
           dp             zero                accumulation
                            one process

An axis or a feature is one line of `FEATURES`: a name, and the plan without it. A run's rungs are the sets of its own
features; what decides nothing without another feature (ZeRO on one rank) falls away as an equal plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from meshwright.config.choices import Documents, Dtype, Offload, OptimizerKind, Recompute, Schedule
from meshwright.config.errors import RequestError
from meshwright.layout.axes import Axis, Degrees
from meshwright.plan.plan import ContextSplit, Pipeline, Plan, Sharding
from meshwright.plan.rules import canonical, check_plan
from meshwright.plan.stages import balanced
from meshwright.verify.settings import DOUBLE, optimizer_of

__all__ = ["FEATURES", "Feature", "Rung", "features_of", "ladder"]


@dataclass(frozen=True, slots=True)
class Feature:
    """Something a run may use: `without(plan)` is the same run without it."""

    name: str
    without: Callable[[Plan], Plan]


@dataclass(frozen=True, slots=True)
class Rung:
    """One comparison. `plan` has the ladder's own optimizer and, but for the precision rung, float64."""

    features: tuple[str, ...]
    plan: Plan

    @property
    def name(self) -> str:
        return " + ".join(self.features) or "one process"


def _degree(axis: Axis) -> Feature:
    def without(plan: Plan) -> Plan:
        degrees = {each.value: 1 if each is axis else plan.degrees.on(each) for each in Axis}
        return replace(plan, degrees=Degrees(**degrees, order=plan.degrees.order))

    return Feature(axis.value, without)


def _execution(name: str, **off: object) -> Feature:
    def without(plan: Plan) -> Plan:
        return replace(plan, execution=replace(plan.execution, **off))  # type: ignore[arg-type]  # fields by name

    return Feature(name, without)


def _one_micro_batch(plan: Plan) -> Plan:
    micro = plan.batch.sequences // (plan.degrees.dp * plan.degrees.ep)
    return replace(plan, batch=replace(plan.batch, micro=micro))


def _plain_schedule(plan: Plan) -> Plan:
    stages = balanced([1.0] * plan.arch.layers, 0.0, 0.0, plan.degrees.pp)
    return replace(plan, pipeline=Pipeline(Schedule.ONE_F_ONE_B, 1, stages))


def _sharding(name: str, **off: object) -> Feature:
    def without(plan: Plan) -> Plan:
        return replace(plan, sharding=replace(plan.sharding, **off))  # type: ignore[arg-type]  # fields by name

    return Feature(name, without)


FEATURES: tuple[Feature, ...] = (
    *(_degree(axis) for axis in (Axis.DP, Axis.TP, Axis.PP, Axis.CP, Axis.EP)),
    Feature("accumulation", _one_micro_batch),
    Feature("schedule", _plain_schedule),
    Feature("zero", lambda plan: replace(plan, sharding=Sharding(bucket_bytes=plan.sharding.bucket_bytes))),
    _sharding("hybrid sharding", within=0),
    _sharding("kept parameters", reshard_after_forward=True),
    _sharding("cut buckets", bucket_bytes=0),
    Feature("context kind", lambda plan: replace(plan, context=ContextSplit())),
    _execution("sequence parallel", sequence=False),
    _execution("asynchronous tensor", asynchronous_tensor=False),
    _execution("recompute", recompute=Recompute.NONE),
    _execution("offload", offload=Offload.NONE, offload_to="memory"),
    _execution("compile", compile=False),
    Feature("dropout", lambda plan: replace(plan, arch=replace(plan.arch, dropout=0.0))),
    Feature("document masks", lambda plan: replace(plan, data=replace(plan.data, documents=Documents.PACKED))),
    Feature("precision", lambda plan: replace(plan, precision=DOUBLE)),
)
"""In the order in which they are taken away: what a later line reads (the mesh) is settled by then."""


def ladder(plan: Plan) -> tuple[Rung, ...]:
    """The rungs of a run, from one process to the whole: each set of features once, equal plans once."""
    plan = replace(plan, optimizer=optimizer_of(OptimizerKind.SGD), name="verify")
    names = features_of(plan)
    exact = [name for name in names if name != "precision"]
    seen: set[Plan] = set()
    rungs = []
    for chosen in (*_subsets(exact), tuple(names)):
        rung = Rung(chosen, _without_choice(_with_only(plan, set(chosen))))
        if rung.plan not in seen and _legal(rung.plan):
            seen.add(rung.plan)
            rungs.append(rung)
    return tuple(rungs)


def features_of(plan: Plan) -> tuple[str, ...]:
    """The features a plan uses."""
    return tuple(feature.name for feature in FEATURES if canonical(feature.without(plan)) != canonical(plan))


def _subsets(names: list[str]) -> Iterator[tuple[str, ...]]:
    for size in (0, 1, 2):
        yield from combinations(names, size)
    yield tuple(names)


def _with_only(plan: Plan, chosen: set[str]) -> Plan:
    for feature in FEATURES:
        if feature.name not in chosen:
            plan = feature.without(plan)
    if len(plan.pipeline.stages) != plan.degrees.pp * plan.pipeline.chunks:
        plan = _plain_schedule(plan)
    return canonical(plan)


def _without_choice(plan: Plan) -> Plan:
    """In a lower precision every token goes to every expert: a near tie that rounding decides otherwise is no fault,
    and moves gradients by far more than rounding does. The auxiliary term has no gradient then, so the z term has."""
    experts = plan.arch.experts
    if experts is None or plan.precision.compute is Dtype.FLOAT64:
        return plan
    moe = replace(plan.moe, z_loss=plan.moe.z_loss or plan.moe.auxiliary_loss)
    return replace(plan, arch=replace(plan.arch, experts=replace(experts, active=experts.count)), moe=moe)


def _legal(plan: Plan) -> bool:
    try:
        check_plan(plan)
    except RequestError:
        return False
    return True
