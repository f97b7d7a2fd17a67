"""Huge pages are asked for under flat memory, and for nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.parallel.allocator import Allocator
from meshwright.parallel.huge_pages import advise
from meshwright.plan.category import Category

MIB = 1 << 20
GIVEN = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def advised_bytes(tensor: torch.Tensor) -> int:
    """How much of a tensor's memory the kernel knows to be wanted in huge pages (the flag `hg` of its mappings)."""
    begin = tensor.untyped_storage().data_ptr()
    end = begin + tensor.untyped_storage().nbytes()
    low = high = total = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            low, high = (int(each, 16) for each in head.split("-"))
        elif head == "VmFlags:" and "hg" in rest.split():
            total += max(0, min(high, end) - max(low, begin))
    return total


@pytest.mark.skipif(sys.platform != "linux" or not GIVEN.exists(), reason="this kernel has no huge pages to ask for")
def test_flat_memory_is_asked_for_in_huge_pages_made_and_made_again() -> None:
    allocator = Allocator(torch.device("cpu"))
    flat = allocator.zeros(16 * MIB // 4, torch.float32, Category.PARAMETERS)
    assert advised_bytes(flat) >= 12 * MIB  # whole huge pages inside of 16 MiB
    allocator.release(flat, Category.PARAMETERS)
    allocator.regrow(flat, Category.PARAMETERS)
    assert advised_bytes(flat) >= 12 * MIB


def test_what_has_no_memory_or_little_is_left_alone() -> None:
    advise(torch.empty(3))
    advise(torch.empty(0))
    advise(torch.empty(MIB, device="meta"))
    with FakeTensorMode():
        advise(torch.empty(MIB))
