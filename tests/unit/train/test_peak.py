"""The peak of a step, read in windows, whoever gave the blocks back."""

from __future__ import annotations

import threading

import pytest
import torch

from meshwright.parallel.allocator import Allocator
from meshwright.plan.action import Action, Op, Phase
from meshwright.train.peak import PeakWatch

KIB = 1024


def test_live_bytes_at_their_most() -> None:
    with PeakWatch(Allocator(torch.device("cpu"))) as watch:
        first = torch.empty(64 * KIB, dtype=torch.uint8)
        second = torch.empty(32 * KIB, dtype=torch.uint8)
        del first
        third = torch.empty(16 * KIB, dtype=torch.uint8)
    assert watch.num_bytes == 96 * KIB
    del second, third


@pytest.mark.parametrize("actions", [3, 600, 2000])
def test_a_step_of_many_actions_is_read_in_windows(actions: int) -> None:
    seen: list[Action] = []
    held = []
    with PeakWatch(Allocator(torch.device("cpu"))) as watch:
        observer = watch.over(seen.append)
        for number in range(actions):
            observer(Action(Op.FORWARD, Phase.FORWARD, micro=number))
            held.append(torch.empty(KIB, dtype=torch.uint8))
            if len(held) == 3:
                held.pop(0)
    assert watch.num_bytes == 3 * KIB
    assert len(seen) == actions


def test_blocks_given_back_by_another_thread_do_not_pile_up() -> None:
    """A process group's thread may be the last to let go of a tensor; the profiler hears only its own."""
    passed: list[torch.Tensor] = []
    with PeakWatch(Allocator(torch.device("cpu"))) as watch:
        for _ in range(200):
            passed.append(torch.empty(256 * KIB, dtype=torch.uint8))
            thread = threading.Thread(target=passed.clear)
            thread.start()
            thread.join()
    assert watch.num_bytes <= 10 * 256 * KIB  # of 200
