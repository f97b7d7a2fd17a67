"""The account of a run: what the plan predicted of a step beside what the first and the later steps measured.

ledger.json    {"predicted": {}, "measured": {}, "traffic_equal": true, "states_equal": true, "peak_near": true}, the
               first two of the shape of an estimate. Traffic, memory and times are of rank 0, `per_rank` memory of
               all; a figure nobody predicted or measured is null.
               Predicted times are null where the device's rates are guesses.

The first step is held against the plan: traffic to the byte and call, states to the byte, the peak of memory within
PEAK_TOLERANCE of what the allocator itself saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.arch.arithmetic import flops_per_sequence, repeated_flops
from meshwright.comm.gather import gather_integers
from meshwright.parallel.engine import Engine
from meshwright.plan.category import Category
from meshwright.plan.folds.ledger import Row, ledger
from meshwright.plan.folds.memory import Timeline, memory
from meshwright.plan.hash import plain
from meshwright.plan.plan import Plan
from meshwright.plan.strategies.expert import Routed
from meshwright.train.figures import Meter
from meshwright.train.stopwatch import STEP_PARTS

__all__ = [
    "HELD",
    "PEAK_TOLERANCE",
    "Account",
    "LedgerError",
    "hardware_flops",
    "ledger_json",
    "peak_bytes",
    "take_account",
]

PEAK_TOLERANCE = 0.05
HELD = frozenset({Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER, Category.MASTER})
"""What the engine's own allocator makes on every device."""


class LedgerError(RuntimeError):
    """A predicted ledger differs from the measured one, and the run asked for equality."""


@dataclass(frozen=True, slots=True)
class Account:
    """Prediction and measurement of the first training step on this rank; the three verdicts are of all ranks.

    `held`: the largest sums of what the engine's own allocator makes, predicted and measured, bytes; `peak_measured`
    that of everything, activations included.
    """

    predicted: tuple[Row, ...]
    measured: tuple[Row, ...]
    traffic_equal: bool
    states_equal: bool
    peak_near: bool
    timeline: Timeline
    peak_measured: int
    held_predicted: int
    held_measured: int
    live: Mapping[str, int]
    """Bytes of each category between steps, measured."""
    largest: Mapping[str, int]
    """Bytes of each category at their most, measured."""

    @property
    def ok(self) -> bool:
        return self.traffic_equal and self.states_equal and self.peak_near


def take_account(engine: Engine, peak: int) -> Account:
    """Read the ledger and the allocator after the first step, which held `peak` bytes. Collective over all ranks."""
    plan, mesh = engine.plan, engine.mesh
    routed = engine.expert_axis.routed if engine.expert_axis is not None else None
    predicted = ledger(plan, mesh.rank, transport=mesh.ledger.transport, routed=routed)
    measured = mesh.ledger.rows
    timeline = _expected(engine, routed)
    live = {category.value: num_bytes for category, num_bytes in engine.allocator.live.items()}
    near = abs(timeline.peak_bytes - peak) <= PEAK_TOLERANCE * peak
    here = [set(predicted) == set(measured), dict(timeline.states) == dict(engine.allocator.live), near]
    traffic, states, near = (all(column) for column in zip(*gather_integers(mesh, [*map(int, here)]), strict=True))
    held = _held_peak(timeline), engine.allocator.peak
    largest = {category.value: num_bytes for category, num_bytes in engine.allocator.largest.items()}
    return Account(predicted, measured, traffic, states, near, timeline, peak, *held, live, largest)


def ledger_json(
    engine: Engine,
    account: Account,
    meter: Meter,
    spent: Mapping[str, float] | None = None,
    priced: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Both estimates and the verdict; `spent`, `priced`: seconds by part, measured and predicted. Collective over all
    ranks."""
    plan, timeline = engine.plan, account.timeline
    both = gather_integers(engine.mesh, [peak_bytes(engine, account), timeline.peak_bytes])
    peaks, expected = ([row[side] for row in both] for side in (0, 1))
    flops = {"model_per_step": meter.model_flops, "hardware_per_step": hardware_flops(plan)}
    predicted_memory: dict[str, Any] = {
        **{category.value: timeline.largest[category] for category in timeline.largest},
        "peak": max(expected), "reserved": None, "device": None,
        "per_rank": [{"rank": rank, "peak": peak} for rank, peak in enumerate(expected)],
    }  # fmt: skip
    measured_memory: dict[str, Any] = {
        **_measured_categories(account),
        "peak": max(peaks), **_device_memory(engine),
        "per_rank": [{"rank": rank, "peak": peak} for rank, peak in enumerate(peaks)],
    }  # fmt: skip
    common = {"plan": plan.hash, "ranks": plan.degrees.ranks}
    return {
        "predicted": {**common, "traffic": _rows(account.predicted), "memory": predicted_memory, "flops": flops,
                      "time": _times(plan, meter, sum(priced.values()) if priced else None, priced)},
        "measured": {**common, "traffic": _rows(account.measured), "memory": measured_memory, "flops": flops,
                     "time": _times(plan, meter, meter.step_seconds, spent)},
        "traffic_equal": account.traffic_equal,
        "states_equal": account.states_equal,
        "peak_near": account.peak_near,
    }  # fmt: skip


def hardware_flops(plan: Plan) -> int:
    """FLOPs of a step over all ranks, recomputation included."""
    sequence = plan.data.sequence_length
    once = flops_per_sequence(plan.arch, sequence) + repeated_flops(plan.arch, sequence, plan.execution.recompute)
    return once * plan.batch.sequences


def peak_bytes(engine: Engine, account: Account) -> int:
    """The most that the program's allocator has held so far, activations included: on CUDA torch's own figure; on a CPU
    that of the first step, which is measured, and which every later step of the same program repeats."""
    device = engine.allocator.device
    later = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else engine.allocator.peak
    return max(account.peak_measured, later)


def _expected(engine: Engine, routed: Routed | None) -> Timeline:
    """What this rank should hold, on its device and backend, with the rows that its experts got."""
    cuda, transport = _on_cuda(engine), engine.mesh.ledger.transport
    threads = 0 if cuda else torch.get_num_threads()
    return memory(
        engine.plan, engine.mesh.rank, transport=transport, fused_norms=cuda, kernel_threads=threads, routed=routed
    )


def _held_peak(timeline: Timeline) -> int:
    live = most = sum(size for category, size in timeline.states.items() if category.value in HELD)
    for event in timeline.events:
        if event.category.value in HELD:
            live += event.change
            most = max(most, live)
    return most


def _measured_categories(account: Account) -> dict[str, int | None]:
    """At their most; activations and logits are torch's own, and counted in the peak alone."""
    return {name: num_bytes if name in HELD else None for name, num_bytes in account.largest.items()}


def _device_memory(engine: Engine) -> dict[str, int | None]:
    if not _on_cuda(engine):
        return {"reserved": None, "device": None}
    device = engine.allocator.device
    free, total = torch.cuda.mem_get_info(device)
    return {"reserved": torch.cuda.max_memory_reserved(device), "device": total - free}


def _on_cuda(engine: Engine) -> bool:
    return engine.allocator.device.type == "cuda"


def _times(
    plan: Plan, meter: Meter, seconds: float | None, spent: Mapping[str, float] | None
) -> dict[str, float | None]:
    """A step of `seconds`; `spent` are the parts of a mean one, scaled so that they add up to it."""
    shown = seconds or None
    ranks = plan.degrees.ranks
    whole = sum(spent[name] for name in STEP_PARTS) if spent else 0.0
    scale = shown / whole if shown and whole else 0.0
    return {
        "step_seconds": shown,
        **(dict.fromkeys(STEP_PARTS) if not spent or not scale else {name: spent[name] * scale for name in STEP_PARTS}),
        "model_tflops_per_gpu": meter.model_flops / shown / ranks / 1e12 if shown else None,
        "mfu": meter.mfu(shown) if shown else None,
        "tokens_per_second_per_gpu": meter.tokens / shown / ranks if shown else None,
    }


def _rows(rows: Sequence[Row]) -> list[object]:
    return [plain(row) for row in rows]
