"""Which machine this is, so that what was measured on another is not taken for its own. No torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

__all__ = ["processor_name", "this_machine"]


def processor_name() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def this_machine() -> str:
    """Processors of this machine, by name and number; not those that this process may use, which a launcher limits."""
    return f"{os.cpu_count() or 1} x {processor_name()}"
