"""A thread of the launching process that passes signals on, notices deaths, and ends what does not end by itself.

                 first failure                  + GRACE_S: SIGKILL to whoever is left
    ranks  ------X----------------------------|
    SIGINT       -> SIGINT to every rank        + GRACE_S: SIGKILL
    SIGTERM      -> SIGTERM to every rank       + stop_s: SIGKILL (they may be saving a checkpoint)
    a second signal                             SIGKILL at once

The elastic agent alone would wait 30 s for ranks that hang in a collective and cannot act on SIGTERM.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from meshwright.launch.processes import Process, open_process
from meshwright.launch.report import Failure, from_json
from meshwright.launch.status import read_status

GRACE_S = 4.0
_POLL_S = 0.02


class Watch(threading.Thread):
    """Watches the ranks whose files lie in `folder` from `start` to `stop`."""

    def __init__(self, folder: Path, world: int, stop_s: float) -> None:
        super().__init__(name="rank-watch", daemon=True)
        self.signals: list[int] = []  # appended by the handler in the main thread, read here
        self.killed: set[int] = set()  # ranks that had to be killed
        self._folder, self._world, self._stop_s = folder, world, stop_s
        self._processes: dict[int, Process] = {}
        self._gone: set[int] = set()  # ranks that ended, in whatever way
        self._deaths: dict[int, float] = {}  # ranks that ended without a record
        self._told: set[int] = set()  # ranks that were sent the first signal
        self._failed_at: float | None = None
        self._signalled_at: float | None = None
        self._kill_at: float | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(_POLL_S):
            self._look(time.monotonic())

    def stop(self) -> None:
        """Ends the watch; call once every rank has ended."""
        self._ended.set()
        self.join()
        for process in self._processes.values():
            process.close()

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Takes SIGINT and SIGTERM of this process for the ranks. Only the main thread can; others change nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signum: int, frame: FrameType | None) -> None:
            self.signals.append(signum)

        # The elastic agent takes SIGQUIT while it runs (it must take one): put back as well.
        before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)}
        try:
            signal.signal(signal.SIGINT, note)
            signal.signal(signal.SIGTERM, note)
            yield
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)

    def failures(self) -> list[Failure]:
        """Every recorded error, and every death that came before the first of them or without any."""
        records = [from_json(file.read_text()) for file in self._folder.glob("rank-*.error")]
        # Later deaths are the agent's doing: it ends the others as soon as it sees one failure.
        until = min((record.at for record in records), default=min(self._deaths.values(), default=0.0))
        silent = [
            Failure(rank, at, "", "", *read_status(self._folder / f"rank-{rank}.status"))
            for rank, at in self._deaths.items()
            if at <= until + _POLL_S and rank not in {record.rank for record in records}
        ]
        return [*records, *silent]

    @property
    def last_step(self) -> int | None:
        """The step that every rank had come to; None where one had come to none."""
        steps = [read_status(self._folder / f"rank-{rank}.status")[0] for rank in range(self._world)]
        known = [step for step in steps if step is not None]
        return min(known) if len(known) == self._world else None

    def _look(self, now: float) -> None:
        self._find_processes()
        self._find_failures(now)
        self._pass_signals(now)
        if self._kill_at is not None and now >= self._kill_at:
            for rank, process in self._processes.items():
                if rank not in self.killed and process.alive():
                    process.send(signal.SIGKILL)
                    self.killed.add(rank)

    def _find_processes(self) -> None:
        for rank in range(self._world):
            file = self._folder / f"rank-{rank}.pid"
            if rank not in self._processes and rank not in self._gone and file.exists():
                process = open_process(int(file.read_text()))
                if process is not None:
                    self._processes[rank] = process
                else:  # it came and went between two looks
                    self._gone.add(rank)

    def _find_failures(self, now: float) -> None:
        self._gone.update(rank for rank, process in self._processes.items() if not process.alive())
        for rank in range(self._world):
            file = self._folder / f"rank-{rank}"
            if file.with_suffix(".error").exists():
                self._fail(now)
            # `done` is looked for after the death was seen: a rank that ends properly has written it by then.
            elif rank in self._gone - self._deaths.keys() and not file.with_suffix(".done").exists():
                if not file.with_suffix(".error").exists():
                    self._deaths[rank] = now
                self._fail(now)

    def _fail(self, now: float) -> None:
        if self._failed_at is None:
            self._failed_at = now
            self._kill_by(now + GRACE_S)

    def _pass_signals(self, now: float) -> None:
        if not self.signals:
            return
        first = self.signals[0]
        for rank, process in self._processes.items():
            if rank not in self._told:  # a rank that started after the signal is told as well
                process.send(first)
                self._told.add(rank)
        if self._signalled_at is None:
            self._signalled_at = now
            self._kill_by(now + (GRACE_S if first == signal.SIGINT else self._stop_s))
        if len(self.signals) > 1:
            self._kill_by(now)

    def _kill_by(self, when: float) -> None:
        self._kill_at = when if self._kill_at is None else min(self._kill_at, when)
