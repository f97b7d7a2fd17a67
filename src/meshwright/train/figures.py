"""The figures of a step: its line in metrics.jsonl, and what is shown of it.

MFU = model FLOPs a second over what the devices could do at most (Chowdhery et al. 2022, arXiv:2204.02311, appendix B),
attention counted with its causal half. Where the devices' peak is not known (`device_peak`), there is none.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from meshwright.arch.arithmetic import flops_per_sequence
from meshwright.observe.progress import Reading
from meshwright.parallel.engine import StepResult
from meshwright.plan.plan import Plan
from meshwright.train.device_peak import Peak

__all__ = ["CONVENTION", "Meter"]

CONVENTION = "6N + causal attention"
_WINDOW = 50  # steps that rates and the remaining time are taken from
_WARM_UP = 1  # the first step pays for everything that happens once


class Meter:
    """Turns results into figures; keeps the last steps' times and nothing else."""

    def __init__(self, plan: Plan, steps: int, peak: Peak | None = None) -> None:
        self._steps, self._peak = steps, peak
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
            **dict(zip(("auxiliary_loss", "z_loss"), result.terms, strict=False)),
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
            convention=self.convention,
            eta_seconds=self.step_seconds * left + seconds_left if self._seconds else None,
        )

    def mfu(self, seconds: float) -> float | None:
        """Model FLOP utilisation of all devices together; None where their peak is not known."""
        return None if self._peak is None else self.model_flops / (seconds * self._peak.flops_per_s)

    @property
    def convention(self) -> str:
        """What is counted, and as a share of what."""
        return CONVENTION if self._peak is None else f"{CONVENTION}, of the {self._peak.source} peak"
