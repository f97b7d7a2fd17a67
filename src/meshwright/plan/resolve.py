"""From what the user asked for to the decisions of a run."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.arch.arch import Arch
from meshwright.arch.arithmetic import operations
from meshwright.config.choices import Balanced, Fill, Weights
from meshwright.config.divisors import nearest_divisors
from meshwright.config.errors import RequestError
from meshwright.config.schema import RunConfig
from meshwright.layout.axes import Degrees
from meshwright.plan.plan import (
    Batch,
    ContextSplit,
    Data,
    Execution,
    Moe,
    Optimizer,
    Pipeline,
    Plan,
    Precision,
    Sharding,
    Start,
)
from meshwright.plan.rules import canonical, check_plan
from meshwright.plan.stages import balanced, owner_of


def resolve(run: RunConfig, arch: Arch, ranks: int | None = None) -> Plan:
    """The plan of `run` for a model of `arch`.

    `ranks` is the number of processes a launcher gives; None starts as many as the mesh needs, and then `mesh.dp =
    "fill"` cannot be resolved. Raises RequestError where the request is impossible.
    """
    degrees = resolve_degrees(run, ranks)
    parallel = run.parallel
    plan = Plan(
        name=run.name,
        seed=run.seed,
        arch=arch,
        start=Start(run.model.weights, (run.model.hf or "") if run.model.weights is Weights.LOAD else ""),
        data=Data(**{name: getattr(run.data, name) for name in type(run.data).model_fields}),
        batch=Batch(run.batch.global_, run.batch.micro),
        optimizer=_optimizer(run),
        precision=Precision(run.precision.compute, run.precision.reduce, run.precision.master),
        degrees=degrees,
        sharding=Sharding(
            parallel.zero, parallel.zero_shard_within, parallel.reshard_after_forward, parallel.bucket_bytes
        ),
        pipeline=Pipeline(parallel.schedule, parallel.chunks, stages_of(run, arch, degrees)),
        context=ContextSplit(parallel.context, parallel.context_inner),
        execution=Execution(
            parallel.recompute,
            parallel.offload,
            parallel.offload_to,
            parallel.compile,
            parallel.sequence,
            parallel.asynchronous_tensor,
        ),
        moe=Moe(**{name: getattr(run.moe, name) for name in type(run.moe).model_fields}),
    )
    plan = canonical(plan)
    check_plan(plan)
    return plan


def resolve_degrees(run: RunConfig, ranks: int | None) -> Degrees:
    """The mesh of `run` on `ranks` processes; raises RequestError where their product does not fit."""
    mesh = run.mesh
    fixed = mesh.tp * mesh.pp * mesh.cp * mesh.ep
    dp = mesh.dp
    if isinstance(dp, Fill):
        if ranks is None:
            raise RequestError(
                'mesh.dp = "fill"', "needs the number of ranks", ("--ranks N", "a launcher", "mesh.dp = 2")
            )
        if ranks % fixed:
            raise RequestError(
                f'mesh.dp = "fill" on {ranks} ranks',
                f"tp x pp x cp x ep = {fixed} must divide the ranks",
                [f"{size} ranks" for size in {ranks // fixed * fixed or fixed, (ranks // fixed + 1) * fixed}],
            )
        dp = ranks // fixed
    degrees = Degrees(dp, mesh.tp, mesh.pp, mesh.cp, mesh.ep, mesh.order)
    if ranks is not None and degrees.ranks != ranks:
        fills = [f"mesh.dp = {ranks // fixed}", 'mesh.dp = "fill"'] if ranks % fixed == 0 else []
        raise RequestError(
            f"a mesh of dp {dp} x tp {mesh.tp} x pp {mesh.pp} x cp {mesh.cp} x ep {mesh.ep} = {degrees.ranks} ranks",
            f"{ranks} ranks were started",
            fills or [f"{degrees.ranks} ranks"],
        )
    return degrees


def steps_of(run: RunConfig) -> int:
    """Optimizer steps of a run: as asked, or as many as its tokens need."""
    if run.train.steps is not None:
        return run.train.steps
    assert run.train.tokens is not None
    return -(-run.train.tokens // (run.batch.global_ * run.data.sequence_length))


def _optimizer(run: RunConfig) -> Optimizer:
    asked = run.optimizer
    return Optimizer(
        kind=asked.kind,
        learning_rate=asked.learning_rate,
        schedule=asked.schedule,
        warmup_steps=asked.warmup_steps,
        min_learning_rate=asked.min_learning_rate,
        betas=asked.betas,
        eps=asked.eps,
        weight_decay=asked.weight_decay,
        clip_norm=asked.clip_norm,
        steps=steps_of(run),
    )


def stages_of(run: RunConfig, arch: Arch, degrees: Degrees) -> tuple[int, ...]:
    """Blocks of each virtual stage. Raises RequestError where there are fewer blocks than stages."""
    asked = run.parallel.stages
    if not isinstance(asked, Balanced):
        return asked if degrees.pp > 1 else (arch.layers,)
    parts = degrees.pp * run.parallel.chunks if degrees.pp > 1 else 1
    if arch.layers < parts:
        works = [f"mesh.pp = {size}" for size in nearest_divisors(arch.layers, degrees.pp)]
        raise RequestError(
            f"{parts} pipeline stages", f"the model has {arch.layers} blocks, one at least a stage", works
        )
    cost = unit_flops(arch, run.data.sequence_length)
    blocks = [cost(unit) for unit in range(1, arch.layers + 1)]
    owners = [owner_of(run.parallel.schedule, degrees.pp, virtual)[0] for virtual in range(parts)]
    return balanced(blocks, cost(0), cost(arch.head_unit), parts, owners)


def unit_flops(arch: Arch, sequence: int) -> Callable[[int], float]:
    """Forward FLOPs of a unit on one sequence of `sequence` tokens."""
    return lambda unit: float(
        sum(operation.forward_flops() for operation in operations(arch, unit, sequence, sequence))
    )
