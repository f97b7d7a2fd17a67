"""What the devices of a run could do at most, in floating-point operations a second: what MFU is a share of.

    CUDA    each rank has a device, whose data sheet states a peak for the dtype of the products
    CPU     `doctor --calibrate` measured what a rank does while all ranks of the machine compute; more threads than
            there were ranks then share the machine, and do not make it faster

Nobody states a peak of a CPU that was not measured, or of a device that is in no catalogue: there is none then.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright.comm.agree import Side, refused_together
from meshwright.config.errors import RequestError
from meshwright.parallel.engine import Engine
from meshwright.plan.plan import Plan
from meshwright.price.catalogue import cluster_of
from meshwright.price.cluster import Cluster
from meshwright.price.target import target_of

__all__ = ["Peak", "peak_here", "peak_of"]


@dataclass(frozen=True, slots=True)
class Peak:
    """`flops_per_s` of all devices of a run together, and who says so: "measured" or "stated"."""

    flops_per_s: float
    source: str


def peak_of(plan: Plan, cluster: Cluster, device: str, hosts: Sequence[str], threads: int) -> Peak | None:
    """The peak of a run on devices of type `device` ("cpu" or "cuda") of `cluster`; None where it is not known.

    `hosts`: the name of each rank's. `threads`: of each rank's operations.
    """
    on_cpu = cluster.device.is_cpu
    if (device == "cpu") is not on_cpu:
        return None
    try:
        one = target_of(plan, cluster).peak_flops
    except RequestError:  # no rate for this dtype
        return None
    if one is None:
        return None
    devices = len(hosts)
    if on_cpu:
        devices = sum(min(ranks * threads, cluster.node.devices) for ranks in Counter(hosts).values())
    measured = cluster.sources.get("device.matrix_flops", "").startswith("measured")
    return Peak(one * devices, "measured" if measured else "stated")


def peak_here(engine: Engine, cluster_name: str, side: Side) -> Peak | None:
    """The peak of the devices that `engine`'s ranks are on, by rank 0's cluster. Collective over all ranks.

    Raises RequestError where the file of that cluster is damaged.
    """
    cluster = refused_together(side, lambda: cluster_of(cluster_name))
    hosts = [name.decode() for name in side.together(platform.node().encode())]
    return peak_of(engine.plan, cluster, engine.allocator.device.type, hosts, torch.get_num_threads())
