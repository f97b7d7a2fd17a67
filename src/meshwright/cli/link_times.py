"""Seconds of collectives and messages on the links of a mesh, all ranks at once. Torch is imported when it runs.

axes        of the mesh that was asked for, as a run on it would use them
inside      the ranks of a node, on every node at once
across      ranks at the same place of every node, all places at once
alone       the same, one place while the others wait: whether devices of a node share an adapter
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from meshwright.comm.communicator import Communicator
    from meshwright.comm.mesh import Mesh
    from meshwright.price.calibration import LinkTime, OverlapTime

__all__ = ["Timer", "axis_times", "overlap_times", "tier_times"]

_AXIS_SIZES = (4096, 65536, 1 << 20, 1 << 24)  # bytes of a whole tensor
_TIER_SIZES = (4096, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_SQUARE, _WORK, _OVERLAPPED = 256, 12, 1 << 20
_REPEATS, _LIMIT_S = 12, 1.0


class _Stopwatch(Protocol):
    """Times what ranks do together, on their kind of device."""

    @property
    def device(self) -> Any: ...

    def together(self, call: Callable[[], object], takes_part: bool = True) -> float:
        """Seconds, equal on all ranks."""


@dataclass(frozen=True)
class Timer:
    """Times what all ranks do together; equal on all of them: the median over ranks of each rank's median."""

    mesh: Mesh
    device: Any

    def agreed(self, seconds: float) -> float:
        """The median over ranks."""
        return median(row[0] for row in self._gathered(seconds)) / 1e9

    def together(self, call: Callable[[], object], takes_part: bool = True) -> float:
        """Of a call of all ranks, or of those that take part while the others wait; as often as the slowest allows."""
        first = self._once(call, takes_part)
        slowest = max(row[0] for row in self._gathered(first)) / 1e9
        repeats = max(3, min(_REPEATS, int(_LIMIT_S / max(slowest, 1e-9))))
        times = []
        if takes_part:
            times = [self._once(call, True) for _ in range(repeats)]
        rows = [row[0] / 1e9 for row in self._gathered(median(times) if times else 0.0)]
        return median(seconds for seconds in rows if seconds)

    def _gathered(self, seconds: float) -> list[list[int]]:
        from meshwright.comm.gather import gather_integers

        return gather_integers(self.mesh, [int(seconds * 1e9)])

    def _once(self, call: Callable[[], object], takes_part: bool) -> float:
        if not takes_part:
            return 0.0
        begin = time.perf_counter()
        call()
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin


class _AfterWork:
    """Times a call after computation of each rank's own, without that: ranks arrive apart, as they do inside a unit."""

    def __init__(self, timer: Timer) -> None:
        import torch

        self.device, self._timer = timer.device, timer
        self._square = torch.zeros(_SQUARE, _SQUARE, device=timer.device)

    def together(self, call: Callable[[], object], takes_part: bool = True) -> float:
        def after() -> None:
            self._work()
            call()

        whole, work = self._timer.together(after, takes_part), self._timer.together(self._work, takes_part)
        return max(whole - work, 0.0)

    def _work(self) -> None:
        for _ in range(_WORK):
            self._square @ self._square


def axis_times(timer: Timer, told: Callable[[str], None]) -> Iterator[LinkTime]:
    """Gathers over every axis of the mesh with several ranks; messages there and back over stages."""
    for axis, over in _axes(timer.mesh):
        for size in _AXIS_SIZES:
            told(f"measuring {axis}")
            yield _message(timer, axis, over, size) if axis == "pp" else _gather(timer, axis, over, size)


def tier_times(timer: Timer, devices: int, told: Callable[[str], None]) -> Iterator[LinkTime]:
    """Sums and gathers inside nodes of `devices` ranks and across them. Collective over the world.

    The mesh of the timer spans the same ranks; one of nodes x devices is made for the time of the measurement.
    """
    from dataclasses import replace

    from meshwright.comm.mesh import Mesh
    from meshwright.layout.groups import GroupName

    ranks = timer.mesh.degrees.ranks
    if ranks == 1 or ranks % devices:
        return
    nodes = ranks // devices
    mesh = Mesh(dp=nodes, tp=devices).start()
    tiers = [("inside", GroupName.TP, devices, 1, True), ("across", GroupName.BATCH, nodes, nodes, True)]
    if devices > 1:
        tiers.append(("alone", GroupName.BATCH, nodes, nodes, mesh.coordinates.tp == 0))
    for tier, name, size, across, takes_part in tiers:
        if size == 1:
            continue
        over = mesh.communicator(name)
        for num_bytes in _TIER_SIZES:
            told(f"measuring links {tier}")
            for measure in (_gather, _reduce):
                found = measure(timer, tier, over, num_bytes, takes_part)
                if tier == "inside":
                    late = measure(_AfterWork(timer), tier, over, num_bytes, takes_part)
                    found = max(found, late, key=lambda each: each.seconds)
                yield replace(found, nodes=across)
    mesh.close()


def overlap_times(timer: Timer, devices: int, told: Callable[[str], None]) -> Iterator[OverlapTime]:
    """Products beside an all-reduce, inside nodes and across them: what of a sum hides under a backward."""
    import torch

    from meshwright.comm.mesh import Mesh
    from meshwright.comm.operations import all_reduce
    from meshwright.layout.groups import GroupName
    from meshwright.plan.action import Phase
    from meshwright.price.calibration import OverlapTime

    ranks = timer.mesh.degrees.ranks
    if ranks == 1 or ranks % devices:
        return
    mesh = Mesh(dp=ranks // devices, tp=devices).start()
    square = torch.zeros(_SQUARE, _SQUARE, device=timer.device)
    whole = torch.zeros(_OVERLAPPED // 4, device=timer.device)
    for tier, name, size in (("inside", GroupName.TP, devices), ("across", GroupName.BATCH, ranks // devices)):
        if size == 1:
            continue
        over = mesh.communicator(name)
        told(f"measuring products beside sums {tier}")
        link = timer.together(lambda: all_reduce(over, whole, Phase.REDUCE).wait())  # noqa: B023  called here
        times = max(1, round(link / timer.together(lambda: torch.mm(square, square))))

        def compute() -> None:
            for _ in range(times):  # noqa: B023
                torch.mm(square, square)

        def both() -> None:
            handle = all_reduce(over, whole, Phase.REDUCE)  # noqa: B023
            compute()
            handle.wait()

        yield OverlapTime(tier, timer.together(compute), link, timer.together(both))
    mesh.close()


def _axes(mesh: Mesh) -> list[tuple[str, Communicator]]:
    """A communicator for every axis with several ranks; dp's is the smallest group of replicas that holds it."""
    from meshwright.layout.axes import Axis
    from meshwright.layout.groups import GroupName

    names = {Axis.TP: GroupName.TP, Axis.CP: GroupName.CP, Axis.EP: GroupName.EP,
             Axis.DP: GroupName.BATCH if mesh.degrees.ep == 1 else GroupName.EXPERT}  # fmt: skip
    out = []
    for axis in mesh.degrees.order:
        if mesh.degrees.on(axis) == 1:
            continue
        if axis is Axis.PP:
            at = mesh.coordinates.pp
            pair = (at, at + 1) if at % 2 == 0 else (at - 1, at)
            if max(pair) < mesh.degrees.pp:
                out.append(("pp", mesh.link(*pair)))
        else:
            out.append((axis.value, mesh.communicator(names[axis])))
    return out


def _message(timer: _Stopwatch, axis: str, over: Communicator, size: int) -> LinkTime:
    import torch

    from meshwright.comm.operations import receive, send
    from meshwright.plan.action import Phase
    from meshwright.price.calibration import LinkTime

    message = torch.zeros(size // 4, device=timer.device)

    def there_and_back() -> None:
        first = over.place == 0
        for mine in (first, not first):
            (send(over, message, Phase.FORWARD) if mine else receive(over, message)).wait()

    return LinkTime(axis, 2, 1, size, timer.together(there_and_back) / 2)


def _gather(timer: _Stopwatch, tier: str, over: Communicator, size: int, takes_part: bool = True) -> LinkTime:
    import torch

    from meshwright.comm.operations import all_gather
    from meshwright.plan.action import Phase
    from meshwright.price.calibration import LinkTime

    whole = torch.zeros(size // 4 // over.size * over.size, device=timer.device)
    moved = whole.numel() * 4 * (over.size - 1) // over.size
    hops = 1 if over.direct else over.size - 1
    seconds = timer.together(lambda: all_gather(over, whole, Phase.FORWARD).wait(), takes_part)
    return LinkTime(tier, over.size, hops, moved, seconds)


def _reduce(timer: _Stopwatch, tier: str, over: Communicator, size: int, takes_part: bool = True) -> LinkTime:
    import torch

    from meshwright.comm.operations import all_reduce
    from meshwright.plan.action import Phase
    from meshwright.price.calibration import LinkTime

    whole = torch.zeros(size // 4, device=timer.device)
    moved = 2 * whole.numel() * 4 * (over.size - 1) // over.size
    seconds = timer.together(lambda: all_reduce(over, whole, Phase.FORWARD).wait(), takes_part)
    return LinkTime(tier, over.size, 2 * (over.size - 1), moved, seconds, operation="all_reduce")
