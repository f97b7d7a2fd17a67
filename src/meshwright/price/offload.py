"""What lives outside the device between its uses, over arrays: what stays, what visits, what the host link costs.

    optimizer   moments and master copies come for their update and go, a bucket at a time; three are on the device
    params      each rank's piece of the parameters (ZeRO-3) comes before every gather, and goes after its update

Transfers run beside updates and gathers; where they take longer, the step waits for them.
"""

from __future__ import annotations

import numpy as np

from meshwright.config.choices import Offload
from meshwright.price.layouts import OFFLOADS, Array, Layouts
from meshwright.price.target import Target


def kept_home(layouts: Layouts, category: str) -> Array:
    """1 where a category of state lives on the device, 0 where it lives elsewhere."""
    if category == "parameters":  # what stays gathered until backward is on the device
        away = (layouts.offload == OFFLOADS.index(Offload.PARAMS)) & (layouts.reshard > 0)
        return np.asarray(1.0 - away)
    return np.asarray(layouts.offload != OFFLOADS.index(Offload.OPTIMIZER), dtype=np.float64)


def guest_bytes(layouts: Layouts, states: dict[str, Array], share: Array) -> tuple[Array, Array]:
    """Bytes of the buckets that visit: beside gathers, and for updates, after the last backward. `states` as if at
    home, of which three buckets are `share`."""
    gathers = (1 - kept_home(layouts, "parameters")) * states["parameters"] * share
    updates = (1 - kept_home(layouts, "optimizer")) * (states["optimizer"] + states["master"]) * share
    return gathers, gathers + updates


def fetch_seconds(target: Target, layouts: Layouts, piece: Array) -> Array:
    """Of a piece of `piece` parameters, before each gather."""
    away = 1 - kept_home(layouts, "parameters")
    return np.asarray(away * piece * target.stored / target.cluster.node.host_bytes_per_s)


def visit_seconds(target: Target, layouts: Layouts, owned: Array) -> Array:
    """There and back, of what an update of `owned` elements needs."""
    states = (1 - kept_home(layouts, "optimizer")) * target.state_bytes
    num_bytes = states + (1 - kept_home(layouts, "parameters")) * target.stored
    return np.asarray(2 * num_bytes * owned / target.cluster.node.host_bytes_per_s)
