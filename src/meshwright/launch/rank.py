"""Prepares the calling process to be a rank: threads, allocator, and an end when its parent ends."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from io import TextIOWrapper
from multiprocessing.connection import wait
from types import FrameType

import torch

# glibc hands blocks above the threshold back to the kernel on free and takes them again zeroed: 50,000 page faults and
# 0.2 s of system time a step in a ZeRO-3 run. Kept in the heap they cost nothing.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_WANTED_BYTES, _OLD_GLIBC_BYTES = 1 << 30, 32 << 20
_PR_SET_PDEATHSIG = 1


def prepare(num_threads: int | None) -> None:
    """Makes this process a well-behaved rank. Call once, first thing.

    Args:
        num_threads: of torch's operations; None keeps torch's choice.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a character that a terminal lacks ends no run
    keep_freed_memory()
    end_with_parent()


def keep_freed_memory() -> bool:
    """Tells glibc's allocator to keep large blocks instead of unmapping them. False where there is no glibc."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    # Some releases refuse a threshold above half an arena (32 MiB); mallopt then returns 0.
    kept = libc.mallopt(_M_MMAP_THRESHOLD, _WANTED_BYTES) or libc.mallopt(_M_MMAP_THRESHOLD, _OLD_GLIBC_BYTES)
    return bool(kept and libc.mallopt(_M_TRIM_THRESHOLD, _WANTED_BYTES))


def end_with_parent() -> None:
    """Ends this process when the process that asked for it ends, however it ends.

    The kernel's death signal follows the fork server, which outlives the asking process for as long as a rank lives;
    so a thread waits on the pipe that only the asking process holds open.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), name="parent-watch", daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt_once() -> None:
    """Makes the first SIGINT raise KeyboardInterrupt and later ones nothing.

    A terminal sends Ctrl-C to every process of the group and the parent passes it on as well: the second one must not
    interrupt the clean-up the first one began.
    """

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)
