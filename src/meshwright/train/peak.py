"""The most memory that a step holds, by the allocator's own events: on a CPU torch's profiler, on CUDA statistics.

On a CPU the profiler sees every block that torch takes and gives back, and costs a step some percent; so one step is
measured, the first. What was there before is what the engine's allocator holds then.

The profiler keeps every event until it is stopped, so it is read and begun anew after some actions; and it hears one
thread. A thread of a process group that lets go of a tensor last, on a busy machine, gives its block back unheard: the
block is counted until its address is taken again, which tells that it was free.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.profiler import profile

from meshwright.launch.environment import quiet_profiler
from meshwright.parallel.allocator import Allocator
from meshwright.plan.action import Action

__all__ = ["PeakWatch"]

_WINDOW_ACTIONS = 256
_ALLOCATION = "Allocation"


class PeakWatch:
    """`num_bytes` after the block: live bytes at their most within it."""

    def __init__(self, allocator: Allocator) -> None:
        self.num_bytes = 0
        self._allocator = allocator
        self._blocks = _Blocks(0)
        self._actions = 0
        self._profile: Any = None

    def __enter__(self) -> PeakWatch:
        before = self._allocator.total
        if self._allocator.device.type == "cuda":
            self._others = torch.cuda.memory_allocated(self._allocator.device) - before
            torch.cuda.reset_peak_memory_stats(self._allocator.device)
            return self
        quiet_profiler()
        gc.collect()  # what an engine before this one held would else be given back under the watch
        self._blocks = _Blocks(before)
        self._begin()
        return self

    def over(self, observer: Callable[[Action], None]) -> Callable[[Action], None]:
        """An observer of the watched step that asks `observer` too: without it all events of the step are kept."""

        def before(action: Action) -> None:
            self._actions += 1
            if self._profile is not None and self._actions % _WINDOW_ACTIONS == 0:
                self._end()
                self._begin()
            observer(action)

        return before

    def __exit__(self, *error: Any) -> None:
        if self._profile is None:
            self.num_bytes = torch.cuda.max_memory_allocated(self._allocator.device) - self._others
            return
        self._end()
        self.num_bytes = self._blocks.most

    def _begin(self) -> None:
        self._profile = profile(profile_memory=True)
        self._profile.__enter__()

    def _end(self) -> None:
        self._profile.__exit__(None, None, None)
        events = [
            (each.start_time_ns, each.extra_fields.ptr, each.extra_fields.alloc_size)
            for each in _all(self._profile.kineto_results.experimental_event_tree())
            if each.tag.name == _ALLOCATION
        ]
        self._profile = None
        for _, address, change in sorted(events, key=lambda event: event[0]):
            self._blocks.change(address, change)


class _Blocks:
    """Live bytes, and their most so far, from what became of each address."""

    def __init__(self, live: int) -> None:
        self.live = self.most = live
        self._taken: dict[int, int] = {}

    def change(self, address: int, num_bytes: int) -> None:
        """A block taken (`num_bytes` above 0) or given back (below)."""
        heard = self._taken.pop(address, 0)
        if num_bytes > 0:
            self._taken[address] = num_bytes
            num_bytes -= heard  # given back before, unheard
        self.live += num_bytes
        self.most = max(self.most, self.live)


def _all(events: Iterable[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)
