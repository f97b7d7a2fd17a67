"""What a process does to become a rank."""

import platform
import signal
import subprocess
import sys

import pytest

from meshwright.launch.processes import open_process

_INTERRUPTED_TWICE = """
import os, signal
from meshwright.launch.rank import interrupt_once
interrupt_once()
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGINT)
    print("cleaned up")
"""

_PAGE_FAULTS = """
import resource, torch
from meshwright.launch.rank import keep_freed_memory
assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30):
    torch.ones(16 << 20)  # the heap grows until a block always finds a place
before = faults()
for _ in range(10):
    torch.ones(16 << 20)
print(faults() - before)
"""


def _python(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def test_the_second_interrupt_does_not_disturb_the_clean_up() -> None:
    assert _python(_INTERRUPTED_TWICE) == "cleaned up"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    # 10 x 64 MiB are 163,840 pages of 4 KiB when each is taken from the kernel anew.
    assert int(_python(_PAGE_FAULTS)) < 20_000


def test_a_handle_sees_the_end_and_signals_nobody_else() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    handle = open_process(child.pid)
    assert handle is not None
    assert handle.alive()
    handle.send(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not handle.alive()
    handle.send(signal.SIGKILL)
    handle.close()
    assert child.stdin is not None
    child.stdin.close()


def test_no_handle_on_a_process_that_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert open_process(child.pid) is None
