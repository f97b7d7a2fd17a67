"""Seconds of collectives: which links an axis lies on, and what an algorithm makes of them. Over arrays.

    a node of 8, tp 4 innermost, dp outside     tp: 4 neighbours, one node       dp: every 4th rank, 2 a node

Inside a node collectives run over the node's link; across nodes a ring enters and leaves each node through the network
links of all members it has there. Bus bandwidths and factors as in nccl-tests PERFORMANCE.md; latencies of rings and
trees as in NCCL graph/tuning.cc.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.price.layouts import Array
from meshwright.price.target import Target


@dataclass(frozen=True)
class Way:
    """How a group reaches itself: its size, members a node, nodes, bus bandwidth."""

    size: Array
    local: Array
    nodes: Array
    bytes_per_s: Array
    reduce_bytes_per_s: Array
    ring_s: Array  # latencies of a pass
    tree_s: Array
    call_s: float
    inside_bytes_per_s: float = 0.0  # of direct exchange: what stays in the node, and a device's share of the network
    outside_bytes_per_s: float = 0.0
    exchange_s: Array | float = 0.0

    def all_reduce(self, num_bytes: Array | float) -> Array:
        """2 (n - 1) / n S / B; the cheaper latency of a ring and a tree."""
        return np.asarray(num_bytes * self._reduce_pace + self.reduce_latency)

    def gather(self, num_bytes: Array | float) -> Array:
        """All-gather or reduce-scatter: (n - 1) / n S / B; a ring, or every rank with every other at once."""
        if self.inside_bytes_per_s:
            return np.asarray(self._direct(num_bytes) + self.alone)
        return np.asarray(num_bytes * self._pace + self.gather_latency)

    def _direct(self, num_bytes: Array | float) -> Array:
        """Each rank sends S / n to every other; what crosses goes beside what stays, all in one hop."""
        part = num_bytes / self.size
        stays = (self.local - 1) * part / self.inside_bytes_per_s
        crosses = (self.size - self.local) * part / self.outside_bytes_per_s
        hop = self.ring_s / np.maximum(self.size - 1, 1)
        return np.asarray(np.maximum(stays, crosses) + np.where(self.size > 1, hop + self.exchange_s, 0.0))

    @cached_property
    def gather_latency(self) -> Array:
        """Of a gather of nothing."""
        return np.asarray(self.ring_s + self.alone)

    @cached_property
    def reduce_latency(self) -> Array:
        """Of an all-reduce of nothing."""
        return np.asarray(2 * self.tree_s + self.alone)

    @cached_property
    def share(self) -> Array:
        return np.asarray((self.size - 1) / self.size)

    @cached_property
    def _pace(self) -> Array:
        """Seconds a byte."""
        return np.asarray(self.share / self.bytes_per_s)

    @cached_property
    def _reduce_pace(self) -> Array:
        return np.asarray(2 * self.share / self.reduce_bytes_per_s)

    @cached_property
    def alone(self) -> Array:
        """Of a call; nobody to call for a group of one, whose passes take no time either."""
        return np.asarray(np.where(self.size > 1, self.call_s, 0.0))


def way(target: Target, size: Array, stride: Array) -> Way:
    """The way of a group of `size` ranks, every `stride`-th one."""
    node, values = target.cluster.node, target.values
    local = np.clip(np.floor(node.devices / stride), 1, size)
    nodes = np.ceil(size / local)
    inside = inside_bytes_per_s(target)
    outside = network_bytes_per_s(target)
    across = np.minimum(inside, outside * local)
    rate = np.where(nodes > 1, across, inside)
    if target.direct:  # gloo's ring adds up on the processor: its rate is its own at every size
        reduced = np.where(nodes > 1, across, node.reduce_bytes_per_s or inside)
    else:
        reduced = np.where((nodes == 1) & (size > 4), max(node.reduce_bytes_per_s, inside), rate)
    hop, network_hop = node.link_latency_s, target.cluster.network.latency_s
    ring = (size - nodes) * hop + np.where(nodes > 1, nodes, 0) * network_hop
    if target.direct:
        exchange = np.where(nodes > 1, target.cluster.network.exchange_s, node.exchange_s)
        return Way(size, local, nodes, rate, reduced, ring, ring, values["link.call_s"], inside, outside, exchange)
    tree = np.minimum(ring, (local - 1) * hop + np.log2(nodes) * network_hop)
    return Way(size, local, nodes, rate, reduced, ring, tree, values["link.call_s"])


def inside_bytes_per_s(target: Target) -> float:
    """Ring bus bandwidth inside a node."""
    node = target.cluster.node
    return node.measured_bytes_per_s or node.link_bytes_per_s * target.values["link.node"]


def network_bytes_per_s(target: Target) -> float:
    """What a device gets from the network: the measured figure as it is, else a share of the data sheet's."""
    network = target.cluster.network
    return network.measured_bytes_per_s or network.bytes_per_s * target.values["link.network"]


def message_seconds(target: Target, num_bytes: Array | float, stride: Array, ranks: Array | None = None) -> Array:
    """A message to the neighbour `stride` ranks away; with `ranks`, the mean over the borders between so many stages.

    Measured figures are bus bandwidths of collectives, which fall short where many rings share adapters; a message has
    its device's own, and all of a shared adapter that no other device of its node sends on.

        a node of 4, stride 2     0 . 2 . | 4 . 6 .      of 3 borders 1 is between nodes; 2 devices send over it
    """
    cluster = target.cluster
    devices = cluster.node.devices
    stages = np.maximum(np.floor(devices / stride), 1)  # of a node
    crossing = np.where(stride < devices, 0.0, 1.0)
    if ranks is not None:
        crossing = np.where(ranks > 1, (np.ceil(ranks / stages) - 1) / np.maximum(ranks - 1, 1), 0.0)
    network = np.maximum(cluster.network.bytes_per_s * target.values["link.network"], network_bytes_per_s(target))
    network = network * (devices / np.minimum(stride, devices) if cluster.network.shared else 1.0)
    inside = num_bytes / inside_bytes_per_s(target) + cluster.node.link_latency_s + cluster.node.exchange_s
    outside = num_bytes / network + cluster.network.latency_s + cluster.network.exchange_s
    return np.asarray(crossing * outside + (1 - crossing) * inside + target.values["link.call_s"])


def exchange_seconds(target: Target, num_bytes: Array | float, group: Way, copies: Array | float) -> Array:
    """All-to-all of a send buffer of `num_bytes`: what stays in the node over its link, the rest over the network.

    `copies`: how many copies of a token are sent; those for one node cross to it once:
    (N - 1) (1 - (1 - 1 / N)^k) of k copies cross N nodes. Direct messages take the way of a gather.
    """
    if group.inside_bytes_per_s:
        return group.gather(num_bytes)
    crossing = (group.nodes - 1) * (1 - (1 - 1 / group.nodes) ** copies) / copies
    staying = (group.local - 1) / group.size
    seconds = (
        staying * num_bytes / inside_bytes_per_s(target)
        + crossing * num_bytes / network_bytes_per_s(target)
        + group.call_s
        + np.where(group.nodes > 1, target.cluster.network.latency_s, target.cluster.node.link_latency_s)
    )
    return np.asarray(np.where(group.size > 1, seconds, 0.0))
