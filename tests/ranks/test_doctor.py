"""`doctor` on real ranks: the mesh is measured, and what it writes can be priced on."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main


@pytest.mark.timeout(120)
def test_links_and_rates_are_measured_and_the_file_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    assert main(["doctor", "mesh.dp=1", "mesh.pp=2", "--calibrate", "--out", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["axes"]) == {"pp"}
    assert all(1e-7 < axis["latency_s"] < 1 and 1e6 < axis["bytes_per_s"] < 1e12 for axis in told["axes"].values())
    assert {product["dtype"] for product in told["measured"]["products"]} == {"float32", "float64", "bfloat16"}
    assert main(["estimate", "--cluster", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"] == "mine"
