"""When a run saves, and what a failed save means.

Periodic saves may fail: the run tells it and goes on, older checkpoints are as they were. The last one may not: a run
whose end is not on disk has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from meshwright.checkpoint.errors import SaveError
from meshwright.checkpoint.saver import Progress, Saver
from meshwright.comm.agree import Side
from meshwright.parallel.engine import Engine
from meshwright.train.job import Job

__all__ = ["Saves"]


class Saves:
    """The checkpoints of a run under way; leaving it waits for the one in flight."""

    def __init__(self, engine: Engine, job: Job, side: Side, corpus: str, told: Callable[[str], None]) -> None:
        self._every, self._steps, self._told = job.saving.every, job.steps, told
        self._lines: list[str] = []  # from the background thread, told between steps
        self._saver = Saver(
            engine,
            job.checkpoints,
            keep=job.saving.keep,
            asynchronous=job.saving.asynchronous,
            corpus=corpus,
            side=side,
            told=self._lines.append,
        )

    def after(self, done: int, samples: int, stopping: bool) -> None:
        """After `done` completed steps: save where it is time, on every rank alike."""
        while self._lines:
            self._told(self._lines.pop(0))
        last = stopping or done == self._steps
        if not last and not (self._every and done % self._every == 0):
            return
        self._try(self._saver.wait)  # the one before may have failed: that is told, and costs this one nothing
        if last:
            self._saver.save(Progress(done, samples))
            self._saver.wait()
        else:
            self._try(lambda: self._saver.save(Progress(done, samples)))
        while self._lines:
            self._told(self._lines.pop(0))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except SaveError as error:
            self._told(f"warning: {error}; training goes on, earlier checkpoints are as they were")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._saver.close()
