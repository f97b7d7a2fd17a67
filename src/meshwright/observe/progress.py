"""What a run says while it trains: a line that lives on a terminal, plain lines where output is piped.

terminal    step  12/250  loss 3.4123  norm 1.02  lr 3.00e-03  8,123 tokens/s  ...  eta 1m 32s     (rewritten)
piped       the same, one line every `log_every` steps
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from meshwright.observe.figures import duration_text, rate_text

__all__ = ["Progress", "Reading", "reading_line"]

_REFRESH_S = 0.1


@dataclass(frozen=True, slots=True)
class Reading:
    """One step of `steps`, seen from outside. `step` counts from 0; rates are of the whole run, not of a rank.

    `flops_per_second` are model FLOPs; `mfu` None: the device's peak is not known; `eta_seconds` None: not known yet.
    """

    step: int
    steps: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    flops_per_second: float
    mfu: float | None
    convention: str
    eta_seconds: float | None


def reading_line(seen: Reading) -> str:
    """A reading as one line."""
    width = len(str(seen.steps))
    parts = [
        f"step {seen.step:>{width}}/{seen.steps}",
        f"loss {seen.loss:.4f}",
        f"norm {seen.grad_norm:.3f}",
        f"lr {seen.learning_rate:.2e}",
        f"{seen.tokens_per_second:,.0f} tokens/s",
        rate_text(seen.flops_per_second, "FLOP/s"),
    ]
    if seen.mfu is not None:
        parts.append(f"MFU {seen.mfu:.1%} ({seen.convention})")
    if seen.eta_seconds is not None:
        parts.append(f"eta {duration_text(seen.eta_seconds)}")
    return "  ".join(parts)


class Progress:
    """Writes to `stream` between `with` and its end; only one rank of a run has one that is not `silent`."""

    def __init__(self, stream: TextIO, log_every: int = 1, silent: bool = False) -> None:
        self._stream, self._log_every, self._silent = stream, log_every, silent
        self._live: Live | None = None
        self._shown_at = 0.0
        if not silent and stream.isatty():
            self._live = Live(Text(), console=Console(file=stream), auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, seen: Reading) -> None:
        """A step was taken."""
        if self._live is not None:
            self._show(reading_line(seen), last=seen.step + 1 == seen.steps)
        elif seen.step % self._log_every == 0 or seen.step + 1 == seen.steps:
            self.say(reading_line(seen))

    def doing(self, text: str) -> None:
        """Something else than a step is going on; shown on a terminal only."""
        if self._live is not None:
            self._show(text)

    def say(self, *lines: str) -> None:
        """Lines that stay."""
        if self._silent:
            return
        for line in lines:
            if self._live is not None:
                self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                print(line, file=self._stream, flush=True)

    def _show(self, text: str, last: bool = False) -> None:
        assert self._live is not None
        now = time.monotonic()
        if last or now - self._shown_at >= _REFRESH_S:
            self._shown_at = now
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
