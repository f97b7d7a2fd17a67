"""A run folder as one page."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshwright.report.run_page import run_page


def times(step: float, compute: float) -> dict[str, float]:
    return {"step_seconds": step, "compute": compute, "dp": step - compute, "tp": 0.0, "mfu": 0.5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    figures = [
        {"step": step, "loss": 5.0 - step, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 9.0}
        for step in range(4)
    ]
    lines = [*figures, {"step": 3, "eval_loss": 2.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = {"group": "dense", "operation": "all_reduce", "phase": "reduce", "calls": 6, "sent_bytes": 12332032}
    sides = {
        "predicted": {"traffic": [row], "memory": {"parameters": 77, "per_rank": []}, "time": times(2.0, 1.5)},
        "measured": {"traffic": [{**row, "sent_bytes": 12332031}], "memory": {"parameters": 78}, "time": times(2.5, 2)},
    }
    (tmp_path / "ledger.json").write_text(json.dumps(sides))
    (tmp_path / "run.toml").write_text('name = "<b>"\n')
    return tmp_path


def test_curves_tables_and_run_file_are_there(folder: Path) -> None:
    page = run_page(folder)
    assert page.count("<polyline") == 4
    assert page.count("<circle") == 1
    assert "12,332,032" in page
    assert "12,332,031" in page
    assert "<td>77</td><td>78</td>" in page
    assert "per_rank" not in page
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


def test_a_step_is_told_by_part(folder: Path) -> None:
    page = run_page(folder)
    assert "<td>step</td><td>2</td><td>100.0%</td><td>2.5</td><td>100.0%</td>" in page
    assert "<td>compute</td><td>1.5</td><td>75.0%</td><td>2</td><td>80.0%</td>" in page
    assert "<td>dp</td>" in page
    assert "<td>tp</td>" not in page  # nobody spent any


def test_times_that_nobody_predicted_are_dashes(folder: Path) -> None:
    ledger = json.loads((folder / "ledger.json").read_text())
    ledger["predicted"]["time"] = dict.fromkeys(ledger["predicted"]["time"])
    (folder / "ledger.json").write_text(json.dumps(ledger))
    assert "<td>compute</td><td>-</td><td>-</td><td>2</td><td>80.0%</td>" in run_page(folder)


def test_a_curve_spans_its_box(folder: Path) -> None:
    picture = run_page(folder).split("<svg", 2)[1].split("</svg>")[0]
    line = ElementTree.fromstring(f"<svg{picture}</svg>").find("polyline")
    assert line is not None
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert len(points) == 4
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert points[0][1] == 8
    assert points[-1][1] > points[0][1]


def test_nothing_is_fetched_and_an_empty_folder_has_a_page(tmp_path: Path) -> None:
    page = run_page(tmp_path)
    assert "http" not in page.replace("http-equiv", "")
    assert "<main>" in page
