"""The canonical form of a plan: a field that decides nothing in a layout has one value there.

Two runs that do the same have equal plans and equal hashes, and no field can be set in vain: `check_plan` refuses a
plan that is not its own canonical form.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.arch.arch import Arch, Rope, RopeScaling
from meshwright.config.choices import (
    Balance,
    Context,
    LearningRateSchedule,
    Offload,
    OptimizerKind,
    Schedule,
    Statistic,
    TokenDtype,
    Weights,
)
from meshwright.layout.axes import DEFAULT_ORDER, Axis, Degrees
from meshwright.plan.plan import ContextSplit, Data, Execution, Moe, Optimizer, Pipeline, Plan, Sharding

__all__ = ["canonical", "num_replicas"]

_RECORDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_RAW = (".bin", ".idx")
_OTHERS = (".txt", ".py", ".npy")


def canonical(plan: Plan) -> Plan:
    """The same run with every field that decides nothing at its one value."""
    start = plan.start if plan.start.source is Weights.LOAD else replace(plan.start, folder="")
    return replace(
        plan,
        arch=_arch(plan.arch),
        start=start,
        data=_data(plan.data),
        optimizer=_optimizer(plan.optimizer),
        degrees=replace(plan.degrees, order=_order(plan.degrees)),
        sharding=_sharding(plan),
        pipeline=_pipeline(plan),
        context=_context(plan),
        execution=_execution(plan),
        moe=_moe(plan),
    )


def num_replicas(plan: Plan) -> int:
    """Ranks that hold copies of a tensor that nothing cuts."""
    return plan.degrees.dp * plan.degrees.ep * plan.degrees.cp


def _arch(arch: Arch) -> Arch:
    windowed = arch.windowed_layers if arch.sliding_window else ()
    if windowed == tuple(range(arch.layers)):
        windowed = ()
    return replace(arch, rope=_rope(arch.rope) if arch.rope else None, windowed_layers=windowed)


def _rope(rope: Rope) -> Rope:
    """Each stretching has numbers of its own."""
    plain = Rope(theta=rope.theta)
    match rope.scaling:
        case RopeScaling.NONE:
            return plain
        case RopeScaling.LINEAR:
            return replace(plain, scaling=rope.scaling, factor=rope.factor)
        case RopeScaling.LLAMA3:
            return replace(
                plain, scaling=rope.scaling, factor=rope.factor, original_positions=rope.original_positions,
                low=rope.low, high=rope.high,
            )  # fmt: skip
        case RopeScaling.YARN:
            return replace(rope, low=plain.low, high=plain.high)


def _data(data: Data) -> Data:
    """A field of records, a type of raw tokens: only where the source's name leaves room for such files."""
    name = data.source.lower()
    known = name == "python" or name.endswith((*_RECORDS, *_RAW, *_OTHERS))
    if known and not name.endswith(_RECORDS):
        data = replace(data, text_field="text")
    if known and not name.endswith(_RAW):
        data = replace(data, dtype=TokenDtype.UINT16)
    return data


def _optimizer(optimizer: Optimizer) -> Optimizer:
    if optimizer.schedule is LearningRateSchedule.CONSTANT:
        optimizer = replace(optimizer, steps=0, min_learning_rate=0.0)
    if optimizer.kind is OptimizerKind.SGD:
        optimizer = replace(optimizer, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0)
    return optimizer


def _order(degrees: Degrees) -> tuple[Axis, ...]:
    """Axes that cut nothing stand where they stand by default; the others fill the other places as asked."""
    active = iter(axis for axis in degrees.order if degrees.on(axis) > 1)
    return tuple(axis if degrees.on(axis) == 1 else next(active) for axis in DEFAULT_ORDER)


def _sharding(plan: Plan) -> Sharding:
    sharding = plan.sharding
    alone = num_replicas(plan) == 1 or sharding.within == 1  # nobody to share with
    stage = 0 if alone else sharding.stage
    within = 0 if stage == 0 or sharding.within == num_replicas(plan) else sharding.within
    reshard = sharding.reshard_after_forward if stage == 3 else True
    return replace(sharding, stage=stage, within=within, reshard_after_forward=reshard)


def _pipeline(plan: Plan) -> Pipeline:
    if plan.degrees.pp > 1:
        return plan.pipeline
    return Pipeline(Schedule.ONE_F_ONE_B, 1, (plan.arch.layers,))


def _context(plan: Plan) -> ContextSplit:
    """A ring of one group that exchanges heads is no ring."""
    context = plan.context
    if plan.degrees.cp == 1:
        return ContextSplit()
    return ContextSplit(Context.ULYSSES) if context == ContextSplit(Context.RING, plan.degrees.cp) else context


def _moe(plan: Plan) -> Moe:
    """Without experts nothing decides; without a term neither its coefficient nor its statistic."""
    if plan.arch.experts is None:
        return Moe()
    moe = plan.moe
    if moe.balance is not Balance.AUXILIARY:
        moe = replace(moe, auxiliary_loss=0.0)
    elif not moe.auxiliary_loss:
        moe = replace(moe, balance=Balance.NONE)
    terms = moe.auxiliary_loss or moe.z_loss
    return moe if terms or moe.balance is Balance.BIAS else replace(moe, statistic=Statistic.SEQUENCE)


def _execution(plan: Plan) -> Execution:
    execution = plan.execution
    if plan.degrees.tp == 1:
        execution = replace(execution, sequence=False, asynchronous_tensor=False)
    stateless = plan.optimizer.kind is OptimizerKind.SGD and not plan.precision.has_master
    if execution.offload is Offload.OPTIMIZER and stateless:
        execution = replace(execution, offload=Offload.NONE)
    if execution.offload is Offload.NONE:
        execution = replace(execution, offload_to="memory")
    return execution
