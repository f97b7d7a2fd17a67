"""What a run tells people: who it is at the start, whether the bytes came out as predicted, how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from meshwright.arch.arithmetic import parameters
from meshwright.config.counted import counted
from meshwright.data import Dataset
from meshwright.layout.axes import Axis
from meshwright.observe.figures import bytes_text, duration_text, rate_text, table_lines
from meshwright.parallel.engine import Engine
from meshwright.plan.folds.ledger import Row
from meshwright.plan.plan import Plan
from meshwright.price.price import Price
from meshwright.train.account import HELD, Account
from meshwright.train.evaluate import EvalResult
from meshwright.train.figures import CONVENTION
from meshwright.train.job import Job
from meshwright.train.outcome import Outcome
from meshwright.train.regret import cluster_name
from meshwright.train.spent import spent_rows
from meshwright.train.stopwatch import Stopwatch

__all__ = [
    "beginning",
    "closing",
    "evaluation",
    "first_step",
    "layout_text",
    "priced_on",
    "spent",
    "spent_parts",
]


def beginning(job: Job, dataset: Dataset, engine: Engine) -> Iterator[str]:
    """The plan in a few lines."""
    plan = job.plan
    step_tokens = plan.batch.sequences * plan.data.sequence_length
    yield f"run    {plan.name} in {job.folder}, plan {plan.hash}"
    if job.saving.address:
        yield f"       checkpoints at {job.saving.address}"
    yield f"data   {dataset.description}"
    for problem in dataset.problems:
        yield f"       left out: {problem}"
    if 2 * dataset.vocab_size < plan.arch.vocab:
        yield f"       warning: the data has {dataset.vocab_size:,} of the model's {plan.arch.vocab:,} tokens"
    yield (
        f"model  {plan.arch.family}, {plan.arch.layers} layers of {plan.arch.hidden}, {parameters(plan.arch):,} "
        f"parameters, {plan.precision.compute}"
    )
    yield f"mesh   {layout_text(plan)} on {engine.allocator.device.type}"
    yield f"batch  {_batch_text(plan)}"
    yield (
        f"train  {job.steps:,} steps = {job.steps * step_tokens:,} tokens, {plan.optimizer.kind}, learning rate "
        f"{plan.optimizer.learning_rate:g} {plan.optimizer.schedule}"
    )


def layout_text(plan: Plan) -> str:
    """2 ranks: dp 2; 4 ranks: cp 4, ring over ulysses groups of 2."""
    degrees = [f"{axis} {plan.degrees.on(axis)}" for axis in Axis if plan.degrees.on(axis) > 1]
    ranks = counted(plan.degrees.ranks, "rank")
    zero = f", ZeRO {plan.sharding.stage}" if plan.sharding.stage else ""
    context = f", {plan.context}" if plan.degrees.cp > 1 else ""
    return f"{ranks}{': ' if degrees else ''}{' x '.join(degrees)}{context}{zero}"


def _batch_text(plan: Plan) -> str:
    """The batch arithmetic."""
    ways = plan.degrees.dp * plan.degrees.ep
    sequences, length = plan.batch.sequences, plan.data.sequence_length
    return (
        f"{counted(sequences, 'sequence')} of {length} tokens a step = {counted(ways, 'batch rank')} x "
        f"{counted(plan.accumulation, 'micro-batch')} x {counted(plan.batch.micro, 'sequence')}"
    )


def first_step(account: Account) -> Iterator[str]:
    """One line where prediction and measurement agree; else what differs, with the table of both."""
    if account.ok:
        calls, sent = sum(row.calls for row in account.measured), sum(row.sent_bytes for row in account.measured)
        off = abs(account.timeline.peak_bytes / account.peak_measured - 1)
        yield (
            f"ledger of a step: predicted = measured, {calls} calls, {bytes_text(sent)} sent by a rank, state "
            f"{bytes_text(sum(account.live.values()))}; peak {bytes_text(account.peak_measured)}, {off:.1%} off"
        )
        return
    if not account.traffic_equal:
        yield "warning: the predicted ledger differs from the measured one (rows of this rank, or of another)"
        yield from _traffic_table(account.predicted, account.measured)
    if not (account.states_equal and account.peak_near):
        yield "warning: predicted memory differs from measured memory (of this rank, or of another)"
        yield from _memory_table(account)


def _memory_table(account: Account) -> list[str]:
    """State by category, and the peak with activations."""
    states = [(name.value, size) for name, size in account.timeline.states.items() if name.value in HELD]
    figures = [(name, size, account.live[name]) for name, size in states]
    figures.append(("peak", account.timeline.peak_bytes, account.peak_measured))
    rows = [[name, f"{ours:,}", f"{theirs:,}", _off(ours, theirs)] for name, ours, theirs in figures]
    return table_lines(["bytes", "predicted", "measured", ""], rows)


def _traffic_table(predicted: Sequence[Row], measured: Sequence[Row]) -> list[str]:
    """Every row of either side, one line each."""
    keys = {_key(row): None for row in (*predicted, *measured)}
    expected, seen = ({_key(row): row for row in rows} for rows in (predicted, measured))
    lines = []
    for key in keys:
        ours, theirs = expected.get(key), seen.get(key)
        verdict = "equal" if ours == theirs else "DIFFERS"
        lines.append([*key, *_cells(ours), *_cells(theirs), verdict])
    headers = ["group", "operation", "phase", "calls", "sent predicted", "calls", "sent measured", ""]
    return table_lines(headers, lines, left=3)


def evaluation(step: int, found: EvalResult, seconds: float) -> str:
    """An evaluation in one line."""
    return (
        f"after step {step}: evaluation loss {found.loss:.4f} nats over {found.trained_tokens:,} tokens "
        f"({duration_text(seconds)})"
    )


def spent(engine: Engine, watch: Stopwatch) -> dict[str, float] | None:
    """Seconds of a mean step by cause; None where launches are not work, or nothing was measured."""
    return watch.seconds if watch.steps and engine.allocator.device.type == "cpu" else None


def spent_parts(engine: Engine, watch: Stopwatch) -> dict[str, float] | None:
    """The same by part, as a price has them, with what computation is made of."""
    return watch.parts | watch.computed if watch.steps and engine.allocator.device.type == "cpu" else None


def priced_on(engine: Engine) -> str:
    """The cluster whose prices a run is held against."""
    device = engine.allocator.device
    return cluster_name(torch.cuda.get_device_name(device) if device.type == "cuda" else "")


def closing(
    job: Job,
    account: Account,
    outcome: Outcome,
    figures: Mapping[str, Any],
    own: Price,
    seconds: Mapping[str, float] | None = None,
    convention: str = CONVENTION,
) -> Iterator[str]:
    """The closing table; `seconds`: of a mean step, by part, beside the price `own`; `convention`: of MFU."""
    if account.predicted or account.measured:
        yield ""
        yield from _traffic_table(account.predicted, account.measured)
    yield ""
    states = {name: size for name, size in account.timeline.states.items() if name.value in HELD}
    mfu: float | None = figures["measured"]["time"]["mfu"]
    rows = [
        ["state between steps", bytes_text(sum(states.values())), bytes_text(sum(account.live.values()))],
        ["  with gradients, at most", bytes_text(account.held_predicted), bytes_text(account.held_measured)],
        ["  with activations, at most", bytes_text(account.timeline.peak_bytes), bytes_text(account.peak_measured)],
        *spent_rows(own, seconds, outcome.step_seconds),
        ["model FLOPs", "-", rate_text(_job_rate(figures, outcome), "FLOP/s")],
        *([["MFU", "-", f"{mfu:.1%}"]] if mfu is not None else []),
    ]
    yield from table_lines(["of rank 0", "predicted", "measured"], rows)
    yield f"model FLOPs: {CONVENTION}" if mfu is None else f"model FLOPs, MFU: {convention}"
    if own.is_uncalibrated:
        yield f"guess: the rates of {own.cluster.name!r} were never measured; `meshwright doctor --calibrate` does"
    yield ""
    losses = f"loss {_number(outcome.first_loss)} -> {_number(outcome.last_loss)}"
    held_out = f", evaluation {_number(outcome.eval_loss)}" if outcome.eval_loss is not None else ""
    ended = f"stopped after {outcome.steps} of {job.steps} steps" if outcome.stopped else f"{outcome.steps} steps"
    yield f"{ended}: {losses}{held_out}; files in {job.folder}"


def _job_rate(figures: Mapping[str, Any], outcome: Outcome) -> float:
    """Model FLOPs a second of the whole run."""
    flops: int = figures["measured"]["flops"]["model_per_step"]
    return flops / outcome.step_seconds if outcome.step_seconds else 0.0


def _off(predicted: int, measured: int) -> str:
    if predicted == measured:
        return "equal"
    return f"{predicted / measured - 1:+.1%}" if measured else "DIFFERS"


def _key(row: Row) -> tuple[str, str, str]:
    return row.group.value, row.operation.value, row.phase.value


def _cells(row: Row | None) -> list[str]:
    return ["-", "-"] if row is None else [str(row.calls), f"{row.sent_bytes:,}"]


def _number(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"
