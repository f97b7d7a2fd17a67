"""SIGTERM asks a run to end after the step that is under way."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["StopRequest"]


class StopRequest:
    """While it is entered, SIGTERM sets `asked` and does nothing else.

    The same signal may come twice, once to the whole process group and once passed on by the launching process; ending
    a rank that does not listen is that process's business.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True
