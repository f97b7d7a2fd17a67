"""Collectives: where a group lies, what an algorithm makes of its links."""

import numpy as np
import pytest

from meshwright.arch.catalogue import preset
from meshwright.config.choices import Dtype
from meshwright.price.catalogue import cluster_of
from meshwright.price.links import Way, exchange_seconds, way
from meshwright.price.target import Target, precision


def target(name: str = "h100-sxm", *words: str) -> Target:
    return Target(preset("llama3-8b"), 2048, precision(Dtype.BFLOAT16), cluster_of(name, words))


def group(size: int, stride: int, *words: str) -> Way:
    return way(target("h100-sxm", *words), np.array([float(size)]), np.array([float(stride)]))


def test_a_group_inside_a_node_uses_its_link() -> None:
    inside = group(8, 1)
    assert (inside.local[0], inside.nodes[0]) == (8, 1)
    assert inside.bytes_per_s[0] == 365e9
    assert inside.reduce_bytes_per_s[0] == 480e9  # switch-made all-reduces from five ranks on
    assert group(4, 1).reduce_bytes_per_s[0] == 365e9


def test_a_ring_over_nodes_uses_all_adapters_of_its_members() -> None:
    assert group(64, 1).bytes_per_s[0] == pytest.approx(8 * 50e9 * 0.70)
    assert group(64, 8).bytes_per_s[0] == pytest.approx(50e9 * 0.70)
    assert group(64, 4).local[0] == 2


def test_a_measured_figure_is_never_discounted() -> None:
    measured = group(64, 8, "cluster.network.measured_bytes_per_s=2e10")
    assert measured.bytes_per_s[0] == 2e10


def test_factors_are_those_of_the_field() -> None:
    seconds = group(8, 1).gather(1e12)[0]
    assert seconds == pytest.approx(7 / 8 * 1e12 / 365e9, rel=1e-3)
    assert group(8, 1).all_reduce(1e12)[0] == pytest.approx(2 * 7 / 8 * 1e12 / 480e9, rel=1e-3)
    assert group(1, 1).all_reduce(1e12)[0] == 0.0


def test_a_ring_of_2048_would_take_19_ms_for_nothing_and_a_tree_does_not() -> None:
    """NCCL's own tuning model: 2 x (1792 x 3.4 us + 256 x 14 us) of pure latency for a ring of 256 nodes."""
    large = group(2048, 1)
    ring = 2 * ((2048 - 256) * 3.4e-6 + 256 * 14e-6)
    assert ring == pytest.approx(19e-3, rel=0.03)
    assert large.all_reduce(8.0)[0] < 0.5e-3
    assert large.gather(8.0)[0] == pytest.approx(ring / 2, rel=0.01)  # gathers have no tree


def test_an_all_to_all_crosses_a_node_border_at_the_networks_rate() -> None:
    buffer = np.array([1e9])
    inside = exchange_seconds(target(), buffer, group(8, 1), 8)[0]
    across = exchange_seconds(target(), buffer, group(64, 1), 8)[0]
    assert 4 < across / inside < 12


def test_copies_for_one_node_cross_once() -> None:
    """Of 8 copies to 4 nodes 3 (1 - (3/4)^8) / 8 = 0.337 cross; 8 alone would be 6/8."""
    four = group(32, 1)
    seconds = exchange_seconds(target(), np.array([1e10]), four, 8)[0]
    crossing = 3 * (1 - (3 / 4) ** 8) / 8 * 1e10 / (50e9 * 0.70)
    assert seconds == pytest.approx(crossing + 7 / 32 * 1e10 / 365e9, rel=1e-2)


def test_more_bandwidth_is_never_slower() -> None:
    slow, fast = group(64, 8), group(64, 8, "cluster.network.bytes_per_s=1e11")
    assert fast.all_reduce(1e9)[0] < slow.all_reduce(1e9)[0]
    assert group(64, 8, "cluster.network.latency_s=0.0").all_reduce(1e9)[0] < slow.all_reduce(1e9)[0]
