"""Huge pages for flat memory on a CPU.

A bucket is one block of megabytes, walked over in every micro-batch. In pages of 4 KiB a product spends a part of its
time on finding where they lie; in pages of 2 MiB it does not. Most distributions give those to whoever asks.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache

from torch import Tensor

__all__ = ["advise"]

_HUGE_BYTES = 2 << 20


def advise(tensor: Tensor) -> None:
    """Ask for huge pages under the storage of `tensor`; nothing where it is not plain memory of Linux.

    Memory that has been touched keeps the pages it has. A refusal by the kernel changes nothing.
    """
    if not sys.platform.startswith("linux") or type(tensor) is not Tensor or tensor.device.type != "cpu":
        return  # a fake tensor has no memory
    storage = tensor.untyped_storage()
    first = -(-storage.data_ptr() // _HUGE_BYTES) * _HUGE_BYTES
    last = (storage.data_ptr() + storage.nbytes()) // _HUGE_BYTES * _HUGE_BYTES
    if last > first:
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_HUGEPAGE)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
