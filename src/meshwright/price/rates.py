"""Rates and constants of the price model from what was measured. Pure arithmetic.

Units are fitted from the inside out, each constant from what the ones before it leave unexplained:

    block forward    = launches + products + attention core + elementwise traffic         -> device.memory_share
    block backward   = launches + products + core + traffic                               -> elementwise.backward.*
    head             = products + a pass over the logits                                  -> logits.bytes.*
    update           = bytes an element                                                   -> optimizer.bytes

Launches are what a block takes whatever its size: two micro-batches of different size tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import numpy as np

from meshwright.price.calibration import LinkTime, Measured, ProductTime, UnitTime, fit
from meshwright.price.cluster import Cluster
from meshwright.price.compute import Units, units
from meshwright.price.constants import VALUES
from meshwright.price.layouts import layouts
from meshwright.price.target import target_of

__all__ = ["link_tables", "matrix_tables", "unit_constants"]

_LEAST_SHARE, _MOST_SHARE = 0.02, 2.0


def matrix_tables(found: Measured) -> dict[str, Any]:
    """Rates of products by type: of large ones, and of the run's own type what a short inner dimension loses."""
    rates: dict[str, list[ProductTime]] = {}
    for product in found.products:
        rates.setdefault(product.dtype, []).append(product)
    if not rates:
        return {}
    fitted = {dtype: _ramp(each) for dtype, each in rates.items()}
    shapes = ", ".join(sorted({f"{each.m}x{each.n}x{each.k}" for each in found.products})[:6])
    own = "float32" if "float32" in fitted else next(iter(fitted))
    return {
        "device": {
            "matrix_flops": {dtype: rate for dtype, (rate, _) in fitted.items()},
            "matrix_share": dict.fromkeys(fitted, 1.0),
        },
        "constants": {"matrix.ramp_k": fitted[own][1]},
        "sources": {"device.matrix_flops": f"measured: through products of {shapes} ..., all ranks at once"},
    }


def _ramp(products: Sequence[ProductTime]) -> tuple[float, float]:
    """(FLOP/s of long products, inner dimension at which half of it is reached): a line through 1/k."""
    inverse = np.array([1 / each.k for each in products])
    slowness = np.array([1 / each.flops_per_s for each in products])
    if len(set(inverse)) < 2:
        return 1 / float(slowness.mean()), 0.0
    slope, level = np.polyfit(inverse, slowness, 1)
    if slope <= 0 or level <= 0:
        return 1 / fmean(slowness), 0.0
    return 1 / float(level), float(slope / level)


def link_tables(found: Measured) -> dict[str, Any]:
    """Latency and bandwidth inside a node and across; axes of the mesh where tiers were not told apart."""
    tiers = {time.axis: [each for each in found.links if each.axis == time.axis] for time in found.links}
    words = ", ".join(f"{axis} {_words(times)}" for axis, times in tiers.items())
    if not tiers:
        return {}
    out: dict[str, Any] = {"sources": {"node.measured_bytes_per_s": f"measured: {words}"}, "constants": {}}
    inside = tiers.get("inside")
    if inside is None:  # the mesh's own axes, on one machine
        plain = {axis: fit(times) for axis, times in tiers.items() if axis not in ("across", "alone")}
        if plain:
            latency, rate = min(plain.values())
            slowest = min(each[1] for each in plain.values())
            out["node"] = {"link_latency_s": latency, "link_bytes_per_s": rate, "measured_bytes_per_s": slowest}
    else:
        hop, exchange = _latencies(inside)
        gather, reduce = (fit(_of(inside, kind))[1] for kind in ("all_gather", "all_reduce"))
        out["node"] = {"link_latency_s": hop, "link_bytes_per_s": gather, "measured_bytes_per_s": gather,
                       "reduce_bytes_per_s": reduce, "exchange_s": exchange}  # fmt: skip
    if inside or tiers.get("across"):  # latencies hold all that a call takes
        out["constants"]["link.call_s"] = 0.0
    if found.overlaps:  # of the farthest tier: gradients meet there
        out["constants"]["overlap.slow"] = found.overlaps[-1].slow
    across = tiers.get("across")
    if across:
        hop, exchange = _latencies(across)
        rate = fmean(fit(_of(across, kind))[1] for kind in ("all_gather", "all_reduce"))
        out["network"] = {"latency_s": hop, "bytes_per_s": rate, "measured_bytes_per_s": rate, "exchange_s": exchange}
        if "alone" in tiers:
            alone = fit(_of(tiers["alone"], "all_gather"))[1]
            out["network"]["shared"] = alone > 0.5 * (1 + found.devices) * rate
    return out


def _of(times: Sequence[LinkTime], operation: str) -> list[LinkTime]:
    return [each for each in times if each.operation == operation]


def _latencies(times: Sequence[LinkTime]) -> tuple[float, float]:
    """(seconds of a hop of a sum, what a gather takes besides its hops)."""
    gather, reduce = (_besides_bytes(_of(times, kind)) for kind in ("all_gather", "all_reduce"))
    hop = reduce / _of(times, "all_reduce")[0].hops
    return hop, max(gather - _of(times, "all_gather")[0].hops * hop, 0.0)


def _besides_bytes(times: Sequence[LinkTime]) -> float:
    """Seconds of a call beside those of its bytes: the median over sizes, for the smallest alone is the least typical
    (adapters let a first burst through)."""
    rate = fit(times)[1]
    return max(median(each.seconds - each.moved_bytes / rate for each in times), 0.0)


def _words(times: Sequence[LinkTime]) -> str:
    latency, rate = fit(_of(times, "all_gather") or times)
    return f"{latency * 1e6:.0f} us {rate / 1e9:.3f} GB/s"


def unit_constants(found: Measured, cluster: Cluster) -> tuple[dict[str, float], float]:
    """Constants that make the price model give the measured units, and the device's share of its memory rate."""
    constants: dict[str, float] = {}
    forward, backward = _line(found.units, "block", "forward_s"), _line(found.units, "block", "backward_s")
    launches = max(forward[0], 0.0), max(backward[0], 0.0)
    constants["host.eager"] = constants["host.fused"] = sum(launches)
    constants |= _core(found, cluster)
    tokens = max(each.tokens for each in found.units if each.unit == "block")
    block = next(each for each in found.units if each.unit == "block" and each.tokens == tokens)

    def at(share: float, more: dict[str, float]) -> Units:
        return _priced(found, cluster, share, constants | more, tokens)

    endless = at(1e6, {})
    traffic = float((at(1.0, {}).forward - endless.forward)[0])
    left = block.forward_s - launches[0] - float(endless.forward[0])
    share = min(max(traffic / max(left, 1e-12), _LEAST_SHARE), _MOST_SHARE)
    usual, none = at(share, {}), at(share, _backward(0.0, cluster))
    slope = float((usual.backward - none.backward)[0])
    left = block.backward_s - launches[1] - float(none.backward[0])
    constants |= _backward(max(left / max(slope, 1e-12), 0.05), cluster)
    constants |= _head(found, at(share, {}), at(share, dict.fromkeys(_LOGITS, 0.0)), cluster)
    update = [each for each in found.units if each.unit == "update"]
    rate = cluster.device.memory_bytes_per_s * share
    constants["optimizer.bytes"] = fmean(each.forward_s * rate / each.tokens for each in update)
    return constants, share


_LOGITS = ("logits.bytes.fused", "logits.bytes.eager")
_BEHIND = ("elementwise.backward.stream", "elementwise.backward.inner")


def _backward(factor: float, cluster: Cluster) -> dict[str, float]:
    values = _values(cluster)
    return {name: factor * values[name] for name in _BEHIND}


def _head(found: Measured, usual: Units, none: Units, cluster: Cluster) -> dict[str, float]:
    tokens = max(each.tokens for each in found.units if each.unit == "head")
    head = next(each for each in found.units if each.unit == "head" and each.tokens == tokens)
    whole, bare = (float((each.head_forward + each.head_backward)[0]) for each in (usual, none))
    factor = max(head.forward_s + head.backward_s - bare, 0.0) / max(whole - bare, 1e-12)
    values = _values(cluster)
    return {name: factor * values[name] for name in _LOGITS}


def _core(found: Measured, cluster: Cluster) -> dict[str, float]:
    """The share of the peak that the attention core reaches, and its backward's."""
    cores = [each for each in found.units if each.unit == "attention"]
    if not cores:
        return {}
    core = max(cores, key=lambda each: each.tokens)
    name = f"attention.{cluster.device.generation}.{cluster.software.attention.value}"
    assert found.plan is not None
    target = target_of(found.plan, cluster)
    block = target.shapes.blocks[0]
    flops = 2 * core.tokens * target.shapes.heads * block.keys * (target.shapes.score_dim + target.shapes.value_dim)
    ramp = target.sequence / (target.sequence + target.values["attention.ramp_tokens"])
    share = flops / (core.forward_s * target.attention_peak * ramp)
    return {name: share, "attention.backward": 2.5 * core.forward_s / core.backward_s}


def _line(times: Sequence[UnitTime], unit: str, way: str) -> tuple[float, float]:
    """(seconds of an empty micro-batch, seconds a token)."""
    own = sorted((each.tokens, float(getattr(each, way))) for each in times if each.unit == unit)
    (few, short), (many, long) = own[0], own[-1]
    slope = (long - short) / (many - few) if many > few else long / many
    return short - few * slope, slope


def _values(cluster: Cluster) -> dict[str, float]:
    return {**VALUES, **cluster.constants}


def _priced(found: Measured, cluster: Cluster, share: float, constants: dict[str, float], tokens: int) -> Units:
    """Units of the measured run on a micro-batch of `tokens`."""
    assert found.plan is not None
    device = replace(cluster.device, memory_share=share)
    target = target_of(found.plan, replace(cluster, device=device, constants={**cluster.constants, **constants}))
    micro = tokens // found.plan.data.sequence_length
    return units(target, layouts(found.plan.arch.layers, micro=micro, sequences=micro))
