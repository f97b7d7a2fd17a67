"""A price as text: a table for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.config.counted import counted
from meshwright.price.memory import CATEGORIES

if TYPE_CHECKING:
    from meshwright.price.price import Price

PART_NAMES = {
    "compute": "computation", "tp": "tensor", "cp": "context", "ep": "experts", "pp": "messages", "dp": "replicas",
    "bubble": "bubble", "optimizer": "optimizer", "other": "host", "data": "data",
}  # fmt: skip
"""Parts of a step, where a word must do."""

_WORDS = {
    "compute": "computation", "tp": "tensor axis", "cp": "context axis", "ep": "expert axis",
    "dp": "replicas: gradients, parameters", "pp": "messages between stages", "bubble": "pipeline bubble",
    "optimizer": "optimizer", "other": "host, rounding", "data": "data",
}  # fmt: skip


def table(price: Price) -> Iterator[str]:
    """Lines: layout, time with its split, memory, traffic."""
    plan = price.plan
    degrees = " ".join(
        f"{axis.value} {plan.degrees.on(axis)}" for axis in plan.degrees.order if plan.degrees.on(axis) > 1
    )
    context = f", {plan.context}" if plan.degrees.cp > 1 else ""
    yield (
        f"{plan.degrees.ranks} x {price.cluster.device.name} ({price.cluster.name}): {degrees or 'one rank'}{context}, "
        + (
            f"ZeRO-{plan.sharding.stage}, {counted(plan.accumulation, 'micro-batch')} of {plan.batch.micro} x "
            f"{plan.data.sequence_length} tokens, {plan.precision.compute.value}"
        )
    )
    yield ""
    yield from _time(price)
    yield ""
    yield from _memory(price)
    yield ""
    yield from _traffic(price)


def _time(price: Price) -> Iterator[str]:
    step = price.step_seconds
    low, high = map(seconds_text, price.range_seconds)
    yield f"time of a step  {seconds_text(step)}   (between {low} and {high})"
    if price.is_uncalibrated:
        name = price.cluster.name
        yield f"  UNCALIBRATED: the rates of {name!r} are guesses; `meshwright doctor --calibrate` measures them"
    if price.simulated_because:
        yield f"  of the simulated program: {price.simulated_because}"
    for name, seconds in sorted(price.parts.items(), key=lambda part: -part[1]):
        if abs(seconds) > step * 5e-4:
            yield f"  {_WORDS[name]:<32} {seconds_text(seconds):>9}  {100 * seconds / step:5.1f} %"
    ranks = price.plan.degrees.ranks
    flops = price.flops
    rates = {
        "model FLOPs, causal attention": flops["model_per_step"],
        "model FLOPs, full attention": flops["model_full_attention_per_step"],
        "hardware FLOPs, causal, with recomputation": flops["hardware_per_step"],
    }
    for name, total in rates.items():
        yield f"  {name:<44} {_rate(total / step / ranks)} a device"
    if price.mfu is not None:
        yield f"  {'MFU (model FLOPs, causal attention)':<44} {100 * price.mfu:8.1f} %"
    tokens = price.plan.batch.sequences * price.plan.data.sequence_length
    yield f"  {'tokens a second':<44} {tokens / step:8.0f}, {tokens / step / ranks:.0f} a device"
    if price.dollars_per_step:
        dollars = price.dollars_per_step
        yield f"  {'price of a step, of 10^9 tokens':<44} {dollars:8.2f}, {dollars / tokens * 1e9:.0f} dollars"


def _memory(price: Price) -> Iterator[str]:
    memory = price.memory
    room = price.cluster.device.memory_bytes
    verdict = "fits" if price.fits_surely else "fits only just" if price.fits else "DOES NOT FIT"
    yield f"memory of a rank  {bytes_text(memory['peak'])} at most, at {price.fullest}; {verdict} in {bytes_text(room)}"
    for name in CATEGORIES:
        if memory[name]:
            yield f"  {name:<32} {bytes_text(memory[name]):>10}"
    if price.worst_peak > memory["peak"]:
        yield f"  {'at most, all tokens to one rank':<32} {bytes_text(price.worst_peak):>10}"
    yield f"  {'allocated / reserved / device':<32} {bytes_text(memory['peak']):>10} / " + (
        f"{bytes_text(memory['reserved'])} / {bytes_text(memory['device'])}"
    )

    peak = price.trained_peak
    if peak is not None and not price.is_folded:
        verdict = "fits" if price.fits_trained else "DOES NOT FIT"
        yield f"  {'as `meshwright train` runs it':<32} {bytes_text(peak):>10}, {verdict}"
    if price.missing:
        yield f"  `meshwright train` does not run yet: {', '.join(price.missing)}"


def _traffic(price: Price) -> Iterator[str]:
    even = ", experts' by even routing" if price.plan.degrees.ep > 1 else ""
    yield f"traffic of rank {price.rank} in a step{even}"
    cells = [("group", "ranks", "operation", "phase", "calls", "payload", "sent")]
    for row in price.traffic:
        names = row.group.value, str(row.ranks), row.operation.value, row.phase.value
        cells.append((*names, str(row.calls), bytes_text(row.payload_bytes), bytes_text(row.sent_bytes)))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        left = "  ".join(cell.ljust(width) for cell, width in zip(line[:4], widths[:4], strict=True))
        right = "  ".join(cell.rjust(width) for cell, width in zip(line[4:], widths[4:], strict=True))
        yield f"  {left}  {right}"


def _rate(flops: float) -> str:
    return f"{flops / 1e12:8.1f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:8.1f} GFLOP/s"


def bytes_text(size: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    for unit, scale in (("days", 86400.0), ("hours", 3600.0)):
        if seconds >= 10 * scale:
            return f"{seconds / scale:,.1f} {unit}"
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"
