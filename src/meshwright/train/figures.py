"""The figures of a step: its line in metrics.jsonl, and what is shown of it.

MFU = model FLOPs a second over what the devices could do at most (Chowdhery et al. 2022, arXiv:2204.02311, appendix B),
attention counted with its causal half. Where a device's peak is not known, there is none.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from meshwright.arch.arithmetic import flops_per_sequence
from meshwright.observe.progress import Reading
from meshwright.parallel.engine import Engine, StepResult
from meshwright.plan.plan import Plan

__all__ = ["CONVENTION", "Meter", "peak_bytes"]

CONVENTION = "6N + causal attention"
_WINDOW = 50  # steps that rates and the remaining time are taken from
_WARM_UP = 1  # the first step pays for everything that happens once


class Meter:
    """Turns results into figures; keeps the last steps' times and nothing else."""

    def __init__(self, plan: Plan, steps: int, peak_flops: float | None = None) -> None:
        self._steps, self._ranks, self._peak_flops = steps, plan.degrees.ranks, peak_flops
        self.tokens = plan.batch.sequences * plan.data.sequence_length
        self.model_flops = flops_per_sequence(plan.arch, plan.data.sequence_length) * plan.batch.sequences
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._seen = 0

    @property
    def step_seconds(self) -> float:
        """The median of the last steps, warm-up left out; 0 before the first."""
        ordered = sorted(self._seconds)
        return ordered[len(ordered) // 2] if ordered else 0.0

    def line(self, step: int, result: StepResult, rate: float, seconds: float, peak: int) -> dict[str, Any]:
        """The line of metrics.jsonl."""
        self._seen += 1
        if self._seen > _WARM_UP or self._steps <= _WARM_UP:
            self._seconds.append(seconds)
        return {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": rate,
            "tokens": self.tokens,
            "trained_tokens": result.trained_tokens,
            "seconds": seconds,
            "tokens_per_second": self.tokens / seconds,
            "mfu": self.mfu(seconds),
            "peak_memory_bytes": peak,
        }

    def reading(self, line: dict[str, Any], seconds_left: float) -> Reading:
        """The same for the screen; `seconds_left`: what remains besides steps (evaluations)."""
        left = self._steps - line["step"] - 1
        return Reading(
            step=line["step"],
            steps=self._steps,
            loss=line["loss"],
            grad_norm=line["grad_norm"],
            learning_rate=line["learning_rate"],
            tokens_per_second=line["tokens_per_second"],
            flops_per_second=self.model_flops / line["seconds"],
            mfu=line["mfu"],
            convention=CONVENTION,
            eta_seconds=self.step_seconds * left + seconds_left if self._seconds else None,
        )

    def mfu(self, seconds: float) -> float | None:
        """Model FLOP utilisation of all ranks; None where the peak of the device is not known."""
        if self._peak_flops is None:
            return None
        return self.model_flops / seconds / (self._ranks * self._peak_flops)


def peak_bytes(engine: Engine) -> int:
    """The most the program's allocator has held: torch's on CUDA; on a CPU the engine's own, without activations."""
    device = engine.allocator.device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else engine.allocator.peak
