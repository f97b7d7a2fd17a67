"""What makes a plan legal: one function a rule, each refusal with the value, the rule and the nearest values that work.

Two kinds of rules: those of arithmetic (what does not divide cannot be cut) and those of canonical form (a field that
decides nothing in this layout holds its one value, so that equal runs have equal plans).
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.arch.checks import check_arch
from meshwright.config.choices import Offload, Weights
from meshwright.config.chunks import check_chunks
from meshwright.config.divisors import nearest_divisors
from meshwright.config.errors import RequestError
from meshwright.plan.canonical import canonical, num_replicas
from meshwright.plan.plan import Plan
from meshwright.plan.strategies import context, expert, tensor

__all__ = ["canonical", "check_plan"]

# Micro-batches times blocks of a step: its program is a list that holds each of them on every rank.
_MOST_VISITS = 1 << 22


def check_plan(plan: Plan) -> None:
    """Raise a RequestError with every rule that `plan` breaks."""
    problems = [
        *_arch(plan), *_start(plan), *_sizes(plan), *_batch(plan), *_chunks(plan),
        *_stages(plan), *_split(plan), *_sharding(plan), *_offload(plan),
        *tensor.problems(plan), *context.problems(plan), *expert.problems(plan),
    ] or list(_canonical(plan))  # fmt: skip
    if problems:
        raise RequestError.joined(problems)


def _arch(plan: Plan) -> Iterator[RequestError]:
    try:
        check_arch(plan.arch)
    except RequestError as problem:
        yield problem


def _start(plan: Plan) -> Iterator[RequestError]:
    if plan.start.source is Weights.LOAD and not plan.start.folder:
        yield RequestError(
            'model.weights = "load"', "needs the folder that holds them", ("model.hf = ...", 'model.weights = "random"')
        )


def _sizes(plan: Plan) -> Iterator[RequestError]:
    sizes = {
        "batch.global": plan.batch.sequences,
        "batch.micro": plan.batch.micro,
        "data.sequence_length": plan.data.sequence_length,
    }
    for name, size in sizes.items():
        if size < 1:
            yield RequestError(f"{name} = {size}", "must be at least 1", (f"{name} = 1",))
    limit = plan.arch.max_positions if plan.arch.rope is None else 0
    if limit and plan.data.sequence_length > limit:
        yield RequestError(
            f"data.sequence_length = {plan.data.sequence_length}",
            f"the model has {limit} learned positions",
            (f"data.sequence_length = {limit}",),
        )


def _batch(plan: Plan) -> Iterator[RequestError]:
    """global = micro * accumulation * dp * ep."""
    ranks = plan.degrees.dp * plan.degrees.ep
    total, micro = plan.batch.sequences, plan.batch.micro
    if total < 1 or micro < 1:
        return
    if total % (micro * ranks) == 0:
        yield from _length(plan)
        return
    across = f"dp {plan.degrees.dp}" + (f" x ep {plan.degrees.ep}" if plan.degrees.ep > 1 else "")
    works = [f"batch.global = {size}" for size in _around(total, micro * ranks)]
    if total % ranks == 0:
        works += [f"batch.micro = {size}" for size in nearest_divisors(total // ranks, micro)]
    else:
        works += [f"mesh.dp = {size}" for size in _parts(total, micro * plan.degrees.ep, plan.degrees.dp)]
        parts = _parts(total, micro * plan.degrees.dp, plan.degrees.ep) if plan.degrees.ep > 1 else []
        works += [f"mesh.ep = {size}" for size in parts if expert.degree_rule(plan.arch, size) is None]
    yield RequestError(
        f"batch.global = {total} with batch.micro = {micro} on {across}",
        f"the global batch must be a multiple of micro x {across} = {micro * ranks}",
        works,
    )


def _length(plan: Plan) -> Iterator[RequestError]:
    """A step whose program can be written down."""
    most = max(1, _MOST_VISITS // plan.arch.layers)
    if plan.accumulation > most:
        yield RequestError(
            f"batch.global = {plan.batch.sequences} with batch.micro = {plan.batch.micro}",
            f"{plan.accumulation} micro-batches a rank are more than a step of {plan.arch.layers} blocks takes, {most}",
            (f"batch.global = {plan.batch.sequences // plan.accumulation * most}", "a larger batch.micro or mesh.dp"),
        )


def _stages(plan: Plan) -> Iterator[RequestError]:
    """Every block on exactly one virtual stage, in order."""
    stages, layers = plan.pipeline.stages, plan.arch.layers
    wanted = plan.degrees.pp * plan.pipeline.chunks
    if len(stages) != wanted:
        yield RequestError(
            f"parallel.stages = {list(stages)}",
            f"must have pp x chunks = {plan.degrees.pp} x {plan.pipeline.chunks} = {wanted} numbers",
            ('parallel.stages = "balanced"',),
        )
    elif sum(stages) != layers or min(stages) < 0:
        yield RequestError(
            f"parallel.stages = {list(stages)} (sum {sum(stages)})",
            f"must hold each of the {layers} blocks once",
            ('parallel.stages = "balanced"',),
        )


def _chunks(plan: Plan) -> Iterator[RequestError]:
    try:
        check_chunks(plan.pipeline.schedule, plan.pipeline.chunks)
    except RequestError as problem:
        yield problem


def _split(plan: Plan) -> Iterator[RequestError]:
    """A compiled unit computes all its gradients at once: a split backward would leave nothing for later."""
    schedule = plan.pipeline.schedule
    if plan.execution.compile and plan.degrees.pp > 1 and schedule.is_split:
        yield RequestError(
            f'parallel.schedule = "{schedule}" with parallel.compile = true',
            "a compiled unit computes all its gradients at once, so there are no weight products to put off",
            ('parallel.schedule = "1f1b"', "parallel.compile = false"),
        )


def _sharding(plan: Plan) -> Iterator[RequestError]:
    sharding, replicas = plan.sharding, num_replicas(plan)
    if not 0 <= sharding.stage <= 3:
        yield RequestError(f"parallel.zero = {sharding.stage}", "must be 0, 1, 2 or 3")
    if sharding.within < 0 or (sharding.within and replicas % sharding.within):
        yield RequestError(
            f"parallel.zero_shard_within = {sharding.within}",
            f"must divide the {replicas} replicas (dp x ep x cp)",
            [f"parallel.zero_shard_within = {size}" for size in nearest_divisors(replicas, sharding.within)],
        )


_SECTIONS = (
    "arch", "start", "data", "optimizer", "degrees", "sharding", "pipeline", "context", "execution", "moe",
)  # fmt: skip


def _offload(plan: Plan) -> Iterator[RequestError]:
    if plan.execution.offload is Offload.PARAMS and plan.sharding.stage != 3:
        yield RequestError(
            f'parallel.offload = "params" with parallel.zero = {plan.sharding.stage} on {num_replicas(plan)} replicas',
            "parameters live elsewhere only where each rank keeps its own piece of them: at stage 3, on several ranks",
            ("parallel.zero = 3", 'parallel.offload = "optimizer"'),
        )


def _canonical(plan: Plan) -> Iterator[RequestError]:
    wanted = canonical(plan)
    for section in _SECTIONS:
        given, one = getattr(plan, section), getattr(wanted, section)
        if given != one:
            yield RequestError(f"plan.{section} = {given}", "has fields that decide nothing here", (f"{one}",))


def _parts(total: int, size: int, wanted: int) -> list[int]:
    """The numbers of parts next to `wanted` into which the groups of `size` sequences can be dealt."""
    return nearest_divisors(total // size, wanted) if total % size == 0 else []


def _around(number: int, step: int) -> list[int]:
    """The positive multiples of `step` on both sides of `number`, nearest first."""
    below, above = number // step * step, -(-number // step) * step
    return sorted((size for size in {below, above} if size > 0), key=lambda size: abs(size - number))
