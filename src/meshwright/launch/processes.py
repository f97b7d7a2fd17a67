"""A handle on a process that is not one's child: alive, signal it, and never its successor with the same number."""

import contextlib
import os
import select
import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """A running process. On Linux a file descriptor pins it; elsewhere its number must do."""

    pid: int
    pidfd: int | None

    def alive(self) -> bool:
        """Whether the process runs (a zombie does not)."""
        if self.pidfd is not None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            return not poll.poll(0)
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def send(self, signum: int) -> None:
        """Sends a signal; nothing happens when the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, signum)
            else:
                os.kill(self.pid, signum)

    def close(self) -> None:
        """Lets go of the process."""
        if self.pidfd is not None:
            os.close(self.pidfd)


def open_process(pid: int) -> Process | None:
    """A handle, or None when no such process runs."""
    try:
        return Process(pid, os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None)
    except ProcessLookupError:
        return None
    except OSError:  # a kernel or a sandbox without pidfd
        return Process(pid, None)
