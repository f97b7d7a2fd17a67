"""What ranks measure of the machine they are on. A rank function for the launcher; torch is imported when it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.comm.communicator import Communicator
    from meshwright.comm.mesh import Mesh
    from meshwright.launch.environment import Place
    from meshwright.price.calibration import Measured

__all__ = ["measure"]

_SHAPES = ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (1024, 256, 1024), (512, 2048, 512))
_SIZES = (4096, 65536, 1 << 20, 1 << 24)  # bytes of a whole tensor
_COPIED = 1 << 26
_REPEATS, _LIMIT_S = 12, 0.1


def measure(
    place: Place, status: Any, sizes: Mapping[str, int], order: tuple[str, ...], device: str, products: bool
) -> Measured:
    """Measure on every rank at once; rank 0's return value holds the medians over ranks."""
    from meshwright.comm.gather import gather_integers
    from meshwright.comm.mesh import Mesh, device_of
    from meshwright.launch.join import join, leave
    from meshwright.price.calibration import LinkTime, Measured, ProductTime

    kind = device_of(device)
    if place.world > 1:
        join(place, kind.type)
    mesh = Mesh(**sizes, order=order).start()

    def agreed(seconds: float) -> float:
        return median(row[0] for row in gather_integers(mesh, [int(seconds * 1e9)])) / 1e9

    status.at(None, "measuring memory")
    copied = agreed(_copy_seconds(kind))
    found: list[ProductTime] = []
    if products:
        for dtype in ("float32", "float64", "bfloat16"):
            for m, n, k in _SHAPES:
                status.at(None, f"measuring {dtype} products of {m} x {n} x {k}")
                found.append(ProductTime(dtype, m, n, k, agreed(_product_seconds(kind, dtype, m, n, k))))
    links: list[LinkTime] = []
    for axis, over in _axes(mesh):
        for size in _SIZES:
            status.at(None, f"measuring {axis}")
            ranks, hops, moved, seconds = _link_seconds(mesh, axis, over, size, kind)
            links.append(LinkTime(axis, ranks, hops, moved, agreed(seconds)))
    name, generation, memory = _device(kind, place.world)
    result = Measured(place.world, name, generation, memory, 2 * _COPIED / copied, tuple(found), tuple(links))
    if place.world > 1:
        leave()
    return result


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


def _timed(call: Callable[[], None], limit_s: float | None = None) -> float:
    """The fastest of several: whatever else the machine does only adds. What ranks do together has no limit of time:
    they would part."""
    call()
    times: list[float] = []
    while len(times) < _REPEATS and (limit_s is None or sum(times) < limit_s):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def _copy_seconds(kind: Any) -> float:
    import torch

    here = torch.ones(_COPIED // 4, device=kind)
    there = torch.empty_like(here)

    def copy() -> None:
        there.copy_(here)
        _finish(kind)

    return _timed(copy, _LIMIT_S)


def _product_seconds(kind: Any, dtype: str, m: int, n: int, k: int) -> float:
    import torch

    left = torch.randn(m, k, device=kind).to(getattr(torch, dtype))
    right = torch.randn(k, n, device=kind).to(getattr(torch, dtype))

    def multiply() -> None:
        left @ right
        _finish(kind)

    return _timed(multiply, _LIMIT_S)


def _link_seconds(mesh: Mesh, axis: str, over: Communicator, size: int, kind: Any) -> tuple[int, int, int, float]:
    """(ranks, hops, bytes through a rank, seconds) of a gather, or of a message there and back for stages."""
    import torch

    from meshwright.comm.operations import all_gather, receive, send
    from meshwright.plan.action import Phase

    if axis == "pp":
        message = torch.zeros(size // 4, device=kind)

        def there_and_back() -> None:
            first = over.place == 0
            for mine in (first, not first):
                (send(over, message, Phase.FORWARD) if mine else receive(over, message)).wait()
            _finish(kind)

        return 2, 1, size, _timed(there_and_back) / 2
    whole = torch.zeros(size // 4 // over.size * over.size, device=kind)

    def gather() -> None:
        all_gather(over, whole, Phase.FORWARD).wait()
        _finish(kind)

    moved = whole.numel() * 4 * (over.size - 1) // over.size
    return over.size, over.size - 1, moved, _timed(gather)


def _finish(kind: Any) -> None:
    if kind.type == "cuda":
        import torch

        torch.cuda.synchronize(kind)


def _device(kind: Any, world: int) -> tuple[str, str, float]:
    """Name, generation and bytes of one rank's device."""
    import torch

    if kind.type == "cuda":
        known = {7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell"}
        properties = torch.cuda.get_device_properties(kind)
        return properties.name, known.get(properties.major, "hopper"), float(properties.total_memory)
    from meshwright.cli.machine import cpu_name, memory_bytes

    return cpu_name(), "cpu", memory_bytes() / max(world, 1)
