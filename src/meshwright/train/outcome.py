"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Equal on every rank but for times. Losses are None where none was taken.

    `stopped`: on request, before the end. `already`: the folder held this run, finished, and nothing was done.
    """

    steps: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    eval_loss: float | None = None
    step_seconds: float = 0.0
    traffic_equal: bool | None = None
    stopped: bool = False
    already: bool = False
