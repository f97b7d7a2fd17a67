"""What the operating system says of this machine. No torch."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from meshwright.price.here import processor_name
from meshwright.train.machine import memory_bytes

__all__ = ["facts"]


def facts() -> Iterator[tuple[str, str]]:
    """(name, value) of processors, memory, limits and versions."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield "processor", f"{processor_name()}, {usable} usable"
    yield "memory", f"{memory_bytes() / 1e9:.1f} GB"
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield "shared memory", f"{shutil.disk_usage(shared).free / 1e9:.1f} GB free in /dev/shm"
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield "open files", f"{files} (at most {most})"
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield "locked memory", "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / 1e6:.0f} MB"
    yield "system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    for package in ("torch", "numpy", "safetensors", "tokenizers", "transformers", "pyarrow"):
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"
