"""Clusters: every number has a source, every key can be overridden, every mistake has one message."""

from dataclasses import fields
from pathlib import Path

import pytest

from meshwright.config.errors import RequestError
from meshwright.price.catalogue import cluster_of, names
from meshwright.price.constants import CONSTANTS, FITTED, Kind
from meshwright.price.price import Price
from meshwright.price.request import requested
from tests.unit.price import published

DOCUMENTED = [
    *("a100-40gb-sxm", "a100-80gb-sxm", "v100-32gb-sxm", "h100-sxm", "h200-sxm", "h800-sxm", "b200-sxm", "b300-sxm"),
    *("gb200-nvl72", "gb300-nvl72", "mi300x", "l40s", "rtx4090", "local"),
]


def test_the_catalogue_holds_what_is_documented() -> None:
    assert set(names()) == set(DOCUMENTED)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_number_of_a_data_sheet_has_a_source(name: str) -> None:
    cluster = cluster_of(name)
    assert cluster.name == name
    given = ["device.memory_bytes", "device.memory_bytes_per_s", "device.matrix_flops", "device.matrix_share"]
    given += ["device.processors", "node.link_bytes_per_s", "node.host_bytes_per_s", "network.bytes_per_s"]
    given += [
        f"node.{field.name}"
        for field in fields(cluster.node)
        if field.name in ("measured_bytes_per_s", "reduce_bytes_per_s") and getattr(cluster.node, field.name)
    ]
    given += ["price.dollars_per_device_hour"] if cluster.price.dollars_per_device_hour else []
    assert not [key for key in given if not cluster.sources.get(key)]


def test_peaks_are_dense_and_links_one_way() -> None:
    """Known mistakes: sparse peaks (1979 in 16 bits on H100), NVLink both ways (900), bits read as bytes (200 GB/s)."""
    h100, a100 = cluster_of("h100-sxm"), cluster_of("a100-80gb-sxm")
    assert h100.device.matrix_flops["bfloat16"] == 989e12
    assert h100.node.link_bytes_per_s == 450e9
    assert (a100.device.matrix_flops["bfloat16"], a100.network.bytes_per_s) == (312e12, 25e9)


def test_overrides_replace_any_key() -> None:
    words = ["cluster.node.devices=4", "cluster.network.bytes_per_s=6.25e9", "cluster.software.attention=unfused"]
    cluster = cluster_of("h100-sxm", [*words, "cluster.device.matrix_flops.bfloat16=5e14"])
    assert (cluster.node.devices, cluster.network.bytes_per_s) == (4, 6.25e9)
    assert cluster.software.attention.value == "unfused"
    assert cluster.device.matrix_flops["bfloat16"] == 5e14


@pytest.mark.parametrize(
    ("name", "words", "told"),
    [
        ("h10", [], "h100-sxm"),
        ("h100-sxm", ["cluster.node.device=8"], "cluster.node.devices"),
        ("h100-sxm", ["cluster.nodes.devices=8"], "cluster.node"),
        ("h100-sxm", ["cluster.software.attention=flash"], "unfused, triton, flash2, flash3"),
        ("h100-sxm", ["cluster.node.devices=0"], "at least 1"),
        ("h100-sxm", ["cluster.network.bytes_per_s=fast"], "must be a number"),
        ("h100-sxm", ["cluster.network.bytes_per_s=-1"], "not negative"),
        ("h100-sxm", ["cluster.device.matrix_flops=3"], "rates by dtype"),
        ("h100-sxm", ["cluster.device.matrix_flops={bf16=1e15}"], "matrix_flops.bfloat16"),
        ("h100-sxm", ["cluster.device.matrix_share.half=0.5"], "is no dtype"),
    ],
)
def test_a_mistake_is_told_with_what_works(name: str, words: list[str], told: str) -> None:
    with pytest.raises(RequestError) as caught:
        cluster_of(name, words)
    assert told in str(caught.value)


def test_a_file_is_a_cluster(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "mine.toml"
    path.write_text(
        '[device]\nname = "X"\ngeneration = "hopper"\nmemory_bytes = 1e9\nmemory_bytes_per_s = 1e12\n'
        "matrix_flops = {bfloat16 = 1e14}\n[node]\ndevices = 2\nlink_bytes_per_s = 1e10\n[network]\nbytes_per_s = 1e9\n"
    )
    assert cluster_of(str(path)).name == "mine"
    path.write_text("[device]\nname = 'X'\n")
    with pytest.raises(RequestError, match=r"needs memory_bytes, memory_bytes_per_s, matrix_flops\n"):
        cluster_of(str(path))


def test_the_documented_keys_make_a_cluster(tmp_path: Path) -> None:
    """A generation was wanted besides, which the documents do not name."""
    path = tmp_path / "mine.toml"
    path.write_text(
        "[device]\nname = 'X'\nmemory_bytes = 8e10\nmemory_bytes_per_s = 1e12\nmatrix_flops = {bfloat16 = 1e14}\n"
        "[node]\ndevices = 2\nlink_bytes_per_s = 1e10\n[network]\nbytes_per_s = 1e9\n"
    )
    words = ["model.preset=llama3.2-1b", "batch.global=4", "batch.micro=1", "precision.compute=bfloat16"]
    run, plan, cluster = requested(None, words, str(path), 4)
    assert run.batch.micro == 1
    mfu = Price(plan, cluster).mfu
    assert mfu is not None
    assert 0.0 < mfu < 1.0


def test_counts_stay_within_what_arrays_hold() -> None:
    with pytest.raises(RequestError, match="must be at most 2147483647"):
        cluster_of("h100-sxm", ["cluster.software.predicted=1e30"])


def test_at_most_ten_constants_are_fitted_and_each_says_where_it_is_from() -> None:
    assert len(FITTED) <= 10
    assert all(constant.source for constant in CONSTANTS.values())
    assert {constant.kind for constant in CONSTANTS.values()} <= set(Kind)


def test_no_constant_belongs_to_a_model_or_a_publication() -> None:
    known = {str(row["model"]["name"]).lower() for row in published.rows()} | {
        published.source(row) for row in published.rows()
    }
    assert not [name for name in CONSTANTS if any(word in name for word in known)]


@pytest.mark.parametrize(
    "word",
    ["network.bytes_per_s=0", "node.link_bytes_per_s=0", "device.memory_bytes=0", "device.memory_bytes_per_s=0",
     "device.matrix_flops={bfloat16=0}", "node.gain_alone=0", "software.release=abc", "software.release=26.13"],
)  # fmt: skip
def test_values_that_no_price_can_be_made_of_are_refused(word: str) -> None:
    """A rate of 0 was divided by: two warnings and a wrong time."""
    with pytest.raises(RequestError, match="must be"):
        cluster_of("h100-sxm", [f"cluster.{word}"])


def test_rates_that_are_unknown_may_be_zero() -> None:
    cluster = cluster_of("h100-sxm", ["cluster.network.measured_bytes_per_s=0", "cluster.software.release=26.04.01"])
    assert cluster.network.measured_bytes_per_s == 0
