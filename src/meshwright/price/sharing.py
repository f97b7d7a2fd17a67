"""Ranks of a node that share its processors, and its one adapter: over arrays of layouts.

Measured rates are of a rank while all others of its node work. Where they do not all do the same at the same time, one
computes while another waits or sends, and each finds more than its share.

    lanes     groups of a node that run independently inside a unit (replicas, or stages, whose tensor groups reach
              into other nodes): one computes while another is on the adapter. A closed network of two stations that
              serve all present at equal shares; mean value analysis (Reiser and Lavenberg 1980): a customer that
              arrives finds the queue of a network with one customer fewer.
    stages    of one node: its processors are busy while any of them is, so that bubbles are those of a pipeline of
              nodes. k stages of which one after another begins take 1 + 2 + ... + k shares of a pass to fill.

Devices of their own (`gain_alone` = 1) leave everything as it is.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from meshwright.layout.axes import Axis
from meshwright.price.exchanges import Exchanges
from meshwright.price.layouts import Array, Layouts
from meshwright.price.schedule import Stages, pipeline_seconds
from meshwright.price.target import Target

__all__ = ["interleaved_exchanges", "on_shared_processors"]


def interleaved_exchanges(
    target: Target, layouts: Layouts, given: Exchanges, forward: Array, backward: Array
) -> Exchanges:
    """What the tensor axis shows of a pass, beside `forward` and `backward` of computation, where lanes take turns."""
    if not target.cluster.network.shared:
        return given
    devices = target.cluster.node.devices
    local = np.clip(np.floor(devices / layouts.stride(Axis.TP)), 1, layouts.tp)
    lanes = np.where(local < layouts.tp, np.maximum(np.floor(devices / local), 1), 1.0)
    gain = np.minimum(target.cluster.node.gain_alone, lanes)
    ahead = _cycle(lanes, gain, forward, given.tp_forward) - forward
    behind = _cycle(lanes, gain, backward, given.tp_backward) - backward
    return replace(given, tp_forward=ahead, tp_backward=behind)


def _cycle(lanes: Array, gain: Array, compute: Array, link: Array) -> Array:
    """Seconds of a pass of one of `lanes` that share processors (alone `gain` times as fast) and an adapter."""
    alone, sent = compute / gain, link / lanes
    queued = (gain - 1) / np.maximum(lanes - 1, 1)  # 0: processors of their own, nobody waits for them
    at_compute, at_link, cycle = np.zeros_like(compute), np.zeros_like(compute), compute + link
    for present in range(1, int(np.max(lanes, initial=1)) + 1):
        first, second = alone * (1 + queued * at_compute), sent * (1 + at_link)
        cycle = np.where(present <= lanes, first + second, cycle)
        whole = np.maximum(first + second, 1e-30)
        at_compute, at_link = present * first / whole, present * second / whole
    return np.asarray(cycle)


def on_shared_processors(
    target: Target, layouts: Layouts, stages: Stages, message: Array, hidden: float, hoisted: Array | float
) -> Array:
    """Seconds of a pipeline, as `pipeline_seconds`, where stages of a node may share its processors."""
    run = pipeline_seconds(layouts, stages, message, hidden, hoisted)
    node = target.cluster.node
    held = np.clip(np.floor(node.devices / layouts.stride(Axis.PP)), 1, layouts.pp)
    gain = np.minimum(node.gain_alone, held)
    if not (gain > 1).any():
        return run
    fast = Stages(**{each.name: _faster(getattr(stages, each.name), gain) for each in fields(stages)})
    alone = pipeline_seconds(layouts, fast, message, hidden, hoisted / gain)
    nodes = np.ceil(layouts.pp / held)
    slowest = np.maximum(np.maximum(sum(stages.first), sum(stages.last)), sum(stages.inner))
    fill = held * (held + 1) / 2 / gain
    # Messages inside the node are the processors' work as well: there and back over each of its held - 1 borders.
    slowest = slowest + 2 * (held - 1) / held * np.where(held == layouts.pp, message, node.exchange_s * (message > 0))
    busy = (layouts.accumulation * held / gain + (nodes - 1) * fill) * slowest + 2 * (nodes - 1) * message
    return np.asarray(np.where(gain > 1, np.maximum(alone, busy), run))


def _faster(each: tuple[Array, Array], gain: Array) -> tuple[Array, Array]:
    return each[0] / gain, each[1] / gain
