"""What was measured becomes a cluster: exact on made-up measurements, and readable again."""

from pathlib import Path

import pytest

from meshwright.price.calibration import LinkTime, Measured, ProductTime, calibrated, fit, write_cluster
from meshwright.price.catalogue import cluster_of


def link(axis: str, moved: int, ranks: int = 2) -> LinkTime:
    """40 us a hop, 2 GB/s."""
    return LinkTime(axis, ranks, ranks - 1, moved, 40e-6 * (ranks - 1) + moved / 2e9)


def product(size: int) -> ProductTime:
    """100 GFLOP/s of long products, half of it at an inner dimension of 64."""
    return ProductTime("float32", size, size, size, 2 * size**3 / 100e9 * (1 + 64 / size))


def test_latency_and_bandwidth_are_found() -> None:
    latency, rate = fit([link("tp", 2048, 4), link("tp", 1 << 20, 4), link("tp", 1 << 24, 4)])
    assert latency == pytest.approx(40e-6, rel=1e-6)
    assert rate == pytest.approx(2e9, rel=1e-6)


def test_noise_cannot_make_a_link_endless() -> None:
    noisy = [LinkTime("dp", 2, 1, 2048, 5e-3), LinkTime("dp", 2, 1, 1 << 24, 4e-3)]
    assert fit(noisy)[1] <= 2 * (1 << 24) / 4e-3


def test_a_calibrated_cluster_is_read_back_and_priced(tmp_path: Path) -> None:
    products = tuple(product(size) for size in (256, 512, 1024))
    found = Measured(2, "CPU", "cpu", 8e9, 12e9, products, (link("dp", 2048), link("dp", 1 << 22)))
    file = write_cluster(calibrated(found, "mine"), tmp_path / "mine.toml")
    cluster = cluster_of(str(file))
    assert cluster == calibrated(found, "mine")
    assert cluster.device.matrix_flops["float32"] == pytest.approx(100e9)
    assert cluster.constants["matrix.ramp_k"] == pytest.approx(64)
    assert cluster.node.measured_bytes_per_s == pytest.approx(2e9, rel=1e-6)
    assert "measured" in cluster.sources["node.measured_bytes_per_s"]


def test_local_is_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    plain = cluster_of("local")
    write_cluster(calibrated(Measured(4, "CPU of the test", "cpu", 8e9, 12e9)))
    assert cluster_of("local").device.name == "CPU of the test"
    assert cluster_of("local", calibrated=False) == plain
