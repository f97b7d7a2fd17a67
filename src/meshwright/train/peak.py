"""The most memory that a step holds, by the allocator's own events: on a CPU torch's profiler, on CUDA statistics.

On a CPU the profiler sees every block that torch takes and gives back, and costs a step some percent; so one step is
measured, the first. What was there before is what the engine's allocator holds then.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch.autograd.profiler import profile

from meshwright.launch.environment import quiet_profiler
from meshwright.parallel.allocator import Allocator

__all__ = ["PeakWatch"]

_MEMORY = "[memory]"


class PeakWatch:
    """`num_bytes` after the block: live bytes at their most within it."""

    def __init__(self, allocator: Allocator) -> None:
        self.num_bytes = 0
        self._allocator = allocator
        self._before = 0
        self._profile: Any = None

    def __enter__(self) -> PeakWatch:
        self._before = self._allocator.total
        if self._allocator.device.type == "cuda":
            self._others = torch.cuda.memory_allocated(self._allocator.device) - self._before
            torch.cuda.reset_peak_memory_stats(self._allocator.device)
            return self
        quiet_profiler()
        self._profile = profile(profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profile is None:
            self.num_bytes = torch.cuda.max_memory_allocated(self._allocator.device) - self._others
            return
        self._profile.__exit__(*error)
        events = [
            (each.start_ns(), each.nbytes()) for each in self._profile.kineto_results.events() if _is_memory(each)
        ]
        events.sort(key=lambda event: event[0])
        self.num_bytes = max(accumulate((change for _, change in events), initial=self._before))
        self._profile = None


def _is_memory(event: Any) -> bool:
    name: str = event.name()
    return name == _MEMORY
