"""The plan of a checkpoint on another layout, and with other data: what commands are asked to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.arch.families import check_runs
from meshwright.config.built import check_built
from meshwright.config.divisors import nearest_divisors
from meshwright.config.errors import RequestError
from meshwright.config.load import build_run, change_run
from meshwright.config.overrides import parse_overrides
from meshwright.config.schema import RunConfig
from meshwright.plan.hash import plain
from meshwright.plan.plan import Plan
from meshwright.plan.resolve import resolve
from meshwright.plan.strategies.expert import check_runs as check_experts

__all__ = ["on_layout", "run_of"]

_SECTIONS = ("mesh", "parallel")
_ALONE = ("mesh.dp=1", "mesh.tp=1", "mesh.pp=1", "mesh.cp=1", "mesh.ep=1", "parallel.zero=0")


def run_of(plan: Plan) -> RunConfig:
    """The keys of a run file that a plan was resolved from, where it still knows them; the model is the plan's own."""
    sharding, execution, pipeline = plan.sharding, plan.execution, plan.pipeline
    tables: dict[str, Any] = {
        "name": plan.name,
        "seed": plan.seed,
        "data": plain(plan.data),
        "mesh": {
            **{axis.value: plan.degrees.on(axis) for axis in plan.degrees.order},
            "order": [axis.value for axis in plan.degrees.order],
        },
        "parallel": {
            "zero": sharding.stage,
            "zero_shard_within": sharding.within,
            "reshard_after_forward": sharding.reshard_after_forward,
            "bucket_bytes": sharding.bucket_bytes,
            "schedule": pipeline.schedule.value,
            "chunks": pipeline.chunks,
            "context": plan.context.kind.value,
            "context_inner": plan.context.inner,
            **_fields(execution),
            "sequence": execution.sequence or plan.degrees.tp == 1,  # of one rank it says nothing: the default
        },
        "batch": {"global": plan.batch.sequences, "micro": plan.batch.micro},
        "precision": plain(plan.precision),
    }
    return build_run(tables)


def on_layout(plan: Plan, overrides: Sequence[str], *, to_run: bool = False) -> Plan:
    """`plan` with keys of [mesh] and [parallel], and batch.micro, changed; keys that are not given stay.

    `to_run`, not to move files: one process, whatever the plan had; keys of [data] may change as well; what is not
    built is refused. A micro-batch that no longer divides the global batch is made smaller, unless it was given. Raises
    RequestError for other keys and impossible layouts.
    """
    sections = (*_SECTIONS, "data") if to_run else _SECTIONS
    keys = [override.name for override in parse_overrides(overrides)]
    for key in keys:
        if key.partition(".")[0] not in sections and key != "batch.micro":
            rule = "cannot be changed here: what was trained stays as it is"
            raise RequestError(key, rule, (*(f"{section}.*" for section in sections), "batch.micro"))
    run = run_of(plan)
    if to_run:
        check_runs(plan.arch)
        run = change_run(run, [*_ALONE, "parallel.schedule=1f1b", "parallel.chunks=1"])
    run = change_run(run, overrides)
    if to_run:
        check_built(run)
    if "batch.micro" not in keys and isinstance(run.mesh.dp, int):
        share, rest = divmod(run.batch.global_, run.mesh.dp * run.mesh.ep)
        if share and not rest and share % run.batch.micro:
            fits = max(size for size in nearest_divisors(share, run.batch.micro) if size <= run.batch.micro)
            run = change_run(run, [f"batch.micro={fits}"])
    stages = plan.pipeline.stages
    if "parallel.stages" not in keys and run.mesh.pp * run.parallel.chunks == len(stages):
        run = change_run(run, [f"parallel.stages={list(stages)}"])
    asked = resolve(run, plan.arch)
    if to_run:
        check_experts(asked)
    return replace(
        plan,
        data=asked.data if to_run else plan.data,
        batch=replace(plan.batch, micro=asked.batch.micro),
        degrees=asked.degrees,
        sharding=asked.sharding,
        pipeline=asked.pipeline,
        context=asked.context,
        execution=asked.execution,
    )


def _fields(execution: object) -> dict[str, Any]:
    value = plain(execution)
    assert isinstance(value, dict)
    return value
