"""Sending what was written to the disk while more is being made.

    without   make and copy to the page cache | flush: the disk works
    with      make and copy to the page cache
                  the disk works ............... | flush

It promises nothing: what has to be on the disk is flushed afterwards, and an error of the disk is told there.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

__all__ = ["WRITEBACK_BYTES", "start_writeback"]

WRITEBACK_BYTES = 8 << 20
"""How much a writer lets come together: enough for a disk to work on, and little is left for the flush."""

_WRITE = 2
"""SYNC_FILE_RANGE_WRITE of linux/fs.h: dirty pages that nobody writes yet go out, and nobody waits for them."""


def start_writeback(descriptor: int) -> None:
    """Start writing an open file's dirty pages. Nothing happens on systems and file systems that do not know how."""
    start = _sync_file_range()
    if start is not None:
        start(descriptor, 0, 0, _WRITE)


@lru_cache(maxsize=1)
def _sync_file_range() -> Any:
    """The call of the C library (sync_file_range(2), Linux), which Python does not have; None elsewhere."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):  # another system; a Windows loader wants a name
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call
