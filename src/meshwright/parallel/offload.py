"""Memory outside the device: what is needed once a step lives elsewhere and visits.

    home     where a tensor lives: host memory (pinned beside a GPU), or a memory-mapped file
    guest    its copy on the device, there for one update

An update of bucket k while its neighbours travel; `worker` is one thread, on a GPU with a stream of its own:

    main      | update k-1            | update k               | update k+1
    worker    | fetch k               | put k-1   fetch k+1    | put k   fetch k+2
    guests    | k-1  k                | k-1  k  k+1            | k  k+1  k+2

At most three buckets are on the device, and the update itself is the same arithmetic on the same numbers: results are
equal to the bit with and without (ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857).
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from meshwright.comm.torch_private import FakeTensor
from meshwright.config.choices import Offload
from meshwright.optim.update import Run
from meshwright.parallel.allocator import Allocator
from meshwright.plan.category import Category
from meshwright.plan.plan import Execution

__all__ = ["Homes", "Visitor", "Visits", "mapped_zeros"]

_numbers = itertools.count()


class Homes:
    """Makes homes where a plan wants them: `execution.offload_to` is "memory" or a folder."""

    def __init__(self, execution: Execution, allocator: Allocator) -> None:
        self.optimizer = execution.offload is Offload.OPTIMIZER
        self.parameters = execution.offload is Offload.PARAMS
        self._folder = None if execution.offload_to == "memory" else Path(execution.offload_to)
        self._allocator = allocator

    def zeros(self, numel: int, dtype: torch.dtype, category: Category, away: bool) -> Tensor:
        """(numel,) of zeros: on the device and counted, or away and not."""
        if not away:
            return self._allocator.zeros(numel, dtype, category)
        if self._folder is not None:
            return mapped_zeros(self._folder, numel, dtype)
        return torch.zeros(numel, dtype=dtype, pin_memory=self._allocator.device.type == "cuda")


def mapped_zeros(folder: Path, numel: int, dtype: torch.dtype) -> Tensor:
    """(numel,) of zeros in a file of its own; the file has no name, so nothing is left however the process ends.

    Raises OSError, with the path and the bytes needed, where the disk is full.
    """
    num_bytes = numel * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(0, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"offload-{os.getpid()}-{next(_numbers)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        path.unlink()
        os.posix_fallocate(descriptor, 0, num_bytes)
        mapping = mmap.mmap(descriptor, num_bytes)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {num_bytes} bytes of offloaded state", str(folder)) from error
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapping, dtype=dtype)  # the tensor keeps the mapping alive


@dataclass(frozen=True, slots=True)
class Visitor:
    """What of one bucket visits: runs whose `values`, `state` or both live away."""

    runs: Sequence[Run]
    values_away: bool
    state_away: bool
    values_category: Category

    @property
    def visits(self) -> bool:
        return bool(self.runs) and (self.values_away or self.state_away)


@dataclass(slots=True)
class _Guest:
    """The copies of one bucket's homes, and the way they are on."""

    runs: list[Run]
    copies: list[tuple[Tensor, Tensor, Category]] = field(default_factory=list)
    """(home, copy, category)"""
    moving: Future[None] | None = None

    def arrive(self) -> None:
        if self.moving is not None:
            self.moving.result()
            self.moving = None


class Visits:
    """Brings the runs of each bucket to the device for its update; `visitors` in the order of updates."""

    def __init__(self, visitors: Sequence[Visitor], allocator: Allocator) -> None:
        self._visitors, self._allocator = visitors, allocator
        self._guests: dict[int, _Guest] = {}
        self._mover = _Mover(allocator.device) if any(each.visits for each in visitors) else None

    def begin(self, place: int) -> Sequence[Run]:
        """The runs of the bucket that is updated at `place`, on the device; the next ones set out."""
        if self._mover is None:
            return self._visitors[place].runs
        for wanted in (place, place + 1):
            if wanted < len(self._visitors) and wanted not in self._guests:
                self._guests[wanted] = self._fetch(self._visitors[wanted])
        guest = self._guests[place]
        guest.arrive()
        return guest.runs

    def end(self, place: int) -> None:
        """Send them home; those before them have arrived there, and so have these after the last update."""
        if self._mover is None:
            return
        guest = self._guests[place]
        guest.moving = self._mover.put([(home, copy) for home, copy, _ in guest.copies])
        last = place + 1 == len(self._visitors)
        for done in (place - 1, place) if last else (place - 1,):
            if done in self._guests:
                self._leave(self._guests.pop(done))

    def _fetch(self, visitor: Visitor) -> _Guest:
        assert self._mover is not None
        guest = _Guest([])
        for run in visitor.runs:
            values, state = run.values, run.state
            if visitor.values_away:
                values = self._copy(guest, run.values, visitor.values_category)
            if visitor.state_away:
                state = tuple(self._copy(guest, each, Category.OPTIMIZER) for each in run.state)
            guest.runs.append(Run(values, state, run.decays, run.step))
        guest.moving = self._mover.fetch([(home, copy) for home, copy, _ in guest.copies])
        return guest

    def _copy(self, guest: _Guest, home: Tensor, category: Category) -> Tensor:
        copy = self._allocator.empty(home.numel(), home.dtype, category)
        guest.copies.append((home, copy, category))
        return copy

    def _leave(self, guest: _Guest) -> None:
        guest.arrive()
        for _, copy, category in guest.copies:
            self._allocator.release(copy, category)


class _Mover:
    """Copies between homes and guests on one thread, in the order asked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="offload")
        weakref.finalize(self, self._worker.shutdown, wait=False)

    def fetch(self, pairs: list[tuple[Tensor, Tensor]]) -> Future[None]:
        return self._submit([(copy, home) for home, copy in pairs])

    def put(self, pairs: list[tuple[Tensor, Tensor]]) -> Future[None]:
        return self._submit(pairs)

    def _submit(self, copies: list[tuple[Tensor, Tensor]]) -> Future[None]:
        """(into, from) each. Fake tensors are copied here and now: their mode is not made for two threads."""
        if any(isinstance(tensor, FakeTensor) for pair in copies for tensor in pair):
            self._move(copies, None)
            done: Future[None] = Future()
            done.set_result(None)
            return done
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None
        return self._worker.submit(self._move, copies, ready)

    def _move(self, copies: list[tuple[Tensor, Tensor]], ready: torch.cuda.Event | None) -> None:
        context = torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
        with torch.no_grad(), context:
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            for into, source in copies:
                into.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()  # of this thread alone; the main thread goes on launching
