"""What ranks measure of the machine they are on. A rank function for the launcher; torch is imported when it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.launch.environment import Place
    from meshwright.plan.plan import Plan
    from meshwright.price.calibration import Measured, ProductTime

__all__ = ["measure"]

_SHAPES = ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (1024, 256, 1024), (512, 2048, 512))
_COPIED = 1 << 26
_REPEATS, _LIMIT_S = 12, 0.1


def measure(
    place: Place, status: Any, sizes: Mapping[str, int], order: tuple[str, ...], device: str, products: bool,
    plans: Sequence[Plan] = (),
) -> Measured:  # fmt: skip
    """Measure on every rank at once; rank 0's return value holds the medians over ranks.

    `products`: rates too; `plans`: runs of one rank whose units are timed, on processors that work synchronously.
    """
    from meshwright.cli.link_times import Timer, axis_times, overlap_times, tier_times
    from meshwright.comm.gather import gather_integers
    from meshwright.comm.mesh import Mesh, device_of
    from meshwright.launch.join import join, leave
    from meshwright.price.calibration import Measured

    kind = device_of(device)
    if place.world > 1:
        join(place, kind.type)
    timer = Timer(Mesh(**sizes, order=order).start(), kind)

    def told(what: str) -> None:
        status.at(None, what)

    told("measuring memory")
    copied = timer.agreed(_copy_seconds(kind))
    devices = 1 + max(row[0] for row in gather_integers(timer.mesh, [place.local_rank]))
    rates, units, overlaps, alone = tuple[Any, ...](), tuple[Any, ...](), tuple[Any, ...](), 1.0
    if products:
        rates = tuple(_products(kind, timer.agreed, told, _shapes(plans)))
        alone = _gain_alone(timer, devices, place.local_rank, kind)
        if kind.type == "cpu":
            units = tuple(_units(plans, timer.agreed, told))
    links = tuple(axis_times(timer, told))
    if products:
        links = (*links, *tier_times(timer, devices, told))
        overlaps = tuple(overlap_times(timer, devices, told))
    name, generation, memory = _device(kind, place.world)
    if place.world > 1:
        leave()
    return Measured(
        ranks=place.world, devices=devices, device=name, generation=generation, memory_bytes=memory,
        memory_bytes_per_s=2 * _COPIED / copied, products=rates, links=links, units=units, gain_alone=alone,
        overlaps=overlaps, plan=plans[0] if plans else None,
    )  # fmt: skip


def _shapes(plans: Sequence[Plan]) -> list[tuple[int, int, int]]:
    """(m, n, k) of the products of these runs' blocks and of their head, and of some usual ones."""
    from meshwright.price.shapes import shapes

    own = set()
    for plan in plans:
        tokens = plan.batch.micro * plan.data.sequence_length
        found = shapes(plan.arch, plan.data.sequence_length)
        own |= {(tokens, each.n, each.k) for block in found.blocks for each in block.products}
        own |= {(each.n, each.k, tokens) for block in found.blocks for each in block.products}
    return sorted(own) or list(_SHAPES)


def _products(
    kind: Any, agreed: Callable[[float], float], told: Callable[[str], None], own: Sequence[tuple[int, int, int]]
) -> list[ProductTime]:
    from meshwright.price.calibration import ProductTime

    found = []
    for dtype in ("float32", "float64", "bfloat16"):
        for m, n, k in own if dtype == "float32" else _SHAPES:
            told(f"measuring {dtype} products of {m} x {n} x {k}")
            agreed(0.0)  # no rank ahead of the others
            found.append(ProductTime(dtype, m, n, k, agreed(_product_seconds(kind, dtype, m, n, k))))
    return found


def _units(plans: Sequence[Plan], agreed: Callable[[float], float], told: Callable[[str], None]) -> list[Any]:
    from meshwright.cli.unit_times import attention_times, unit_times

    found = []
    for plan in plans:
        told(f"measuring units of {plan.batch.micro} x {plan.data.sequence_length} tokens")
        found += [*unit_times(plan, agreed), attention_times(plan, agreed)]
    return found


def _gain_alone(timer: Any, devices: int, local_rank: int, kind: Any) -> float:
    """How much faster a product is while the other devices of the node wait: more than 1 where they share cores."""
    if devices == 1:
        return 1.0
    timer.agreed(0.0)
    busy = timer.agreed(_product_seconds(kind, "float32", 512, 512, 512))
    own = _product_seconds(kind, "float32", 512, 512, 512) if local_rank == 0 else 0.0
    from meshwright.comm.gather import gather_integers

    alone = min(row[0] for row in gather_integers(timer.mesh, [int(own * 1e9)]) if row[0]) / 1e9
    return max(1.0, min(float(busy / alone), float(devices)))


def _timed(call: Callable[[], None], limit_s: float) -> float:
    """The mean of calls that follow each other: shared cores take turns over longer than one."""
    call()
    begin, count = time.perf_counter(), 0
    while count < _REPEATS or time.perf_counter() - begin < limit_s:
        call()
        count += 1
    return (time.perf_counter() - begin) / count


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
    from meshwright.price.here import processor_name
    from meshwright.train.machine import memory_bytes

    return processor_name(), "cpu", memory_bytes() / max(world, 1)
