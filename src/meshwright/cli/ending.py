"""How a training run ended, as the one JSON object of ``train --json``: of a failure or a signal too, what is known.

    status   done      "already": the folder held this run, finished, and nothing was done
             stopped   on request, before the end; "signal" says which
             failed    "error" is the closing line of the log

``steps`` are completed optimizer steps; null where nobody can tell.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.cli.output import print_json

if TYPE_CHECKING:
    from meshwright.train.job import Job

__all__ = ["Ending"]


class Ending:
    """Tells that `job` was done already, and prints how it ended where JSON was asked for; a `silent` rank leaves both
    to another."""

    def __init__(self, job: Job, silent: bool = False) -> None:
        self._job, self._silent = job, silent
        self.stopped = False
        """Whether ranks returned because they were asked to stop."""

    def of(self, run: Callable[[], Sequence[Any]]) -> Callable[[], None]:
        """`run`, which returns the outcomes, as a call that prints what became of it and raises what it raises."""
        from meshwright.launch.local import InterruptedRanksError, LaunchError

        def call() -> None:
            try:
                self._outcome(run()[0])
            except InterruptedRanksError as error:
                if error.results:
                    self._outcome(error.results[0], error.signal.name)
                else:
                    self._print("stopped", signal=error.signal.name, steps=error.step)
                raise
            except KeyboardInterrupt:  # of a rank that a launcher started
                self._print("stopped", signal="SIGINT", steps=None)
                raise
            except LaunchError as error:
                if not error.failure.refused:
                    self._print("failed", steps=error.failure.step, error=error.failure.line())
                raise

        return call

    def already(self) -> None:
        """The run stood in its folder, finished."""
        from meshwright.train.outcome import Outcome

        self._outcome(Outcome(steps=self._job.steps, already=True))

    def _outcome(self, outcome: Any, signal: str | None = None) -> None:
        self.stopped = outcome.stopped
        if outcome.already and not self._silent:
            print(f"{self._job.folder} holds this run, finished: nothing to do", file=sys.stderr)
        found = {name: _finite(value) for name, value in dataclasses.asdict(outcome).items()}
        self._print("stopped" if self.stopped else "done", signal=signal, **found)

    def _print(self, status: str, **found: Any) -> None:
        if self._job.quiet_stdout and not self._silent:
            job = self._job
            print_json(
                {"name": job.plan.name, "folder": str(job.folder), "plan": job.plan.hash, "status": status, **found}
            )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
