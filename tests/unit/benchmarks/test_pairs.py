"""The figures of paired rounds, from seconds made up."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from benchmarks import pairs


def seconds(ours: list[float], theirs: list[float]) -> pairs.Seconds:
    return {"ours": {"cpu": ours, "wall": ours}, "theirs": {"cpu": theirs, "wall": theirs}}


def test_medians_over_rounds_of_means_over_ranks_and_ratios_round_by_round() -> None:
    ranks = [seconds([1.0, 2.0, 9.0], [2.0, 2.0, 4.0]), seconds([3.0, 4.0, 9.0], [2.0, 4.0, 8.0])]
    found = pairs.summarise(ranks)  # means: ours 2, 3, 9; theirs 2, 3, 6; ratios 1, 1, 1.5
    assert found["ours_cpu_seconds"] == 3
    assert found["theirs_cpu_seconds"] == 3
    assert (found["cpu_ratio"], found["cpu_ratio_low"], found["cpu_ratio_high"]) == (1, 1, 1.5)
    assert found["wall_ratio"] == found["cpu_ratio"]


def test_sides_are_named() -> None:
    one = seconds([1.0], [2.0])
    found = pairs.summarise([{"away": one["ours"], "here": one["theirs"]}], ours="away", theirs="here")
    assert found["cpu_ratio"] == 0.5


def test_a_report_is_whole_after_each_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    report = pairs.Report("tensor", argparse.Namespace(json=file, rounds=1))
    report.pair("tp2", 2, pairs.summarise([seconds([1.0], [2.0])]), ", and more")
    first = json.loads(file.read_text())
    report.pair("tp2sp", 4, pairs.summarise([seconds([1.0], [2.0])]))
    second = json.loads(file.read_text())
    assert list(first["pairs"]) == ["tp2"]
    assert list(second["pairs"]) == ["tp2", "tp2sp"]
    assert (first["pairs"]["tp2"]["bar"], first["pairs"]["tp2"]["peer"]) == (0.85, "DTensor")
    assert second["pairs"]["tp2sp"]["bar"] is None  # no bar is set on 4 ranks
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("tp2:"))
    assert (
        line == "tp2: CPU 1.000 s, DTensor 2.000 s, ratio 0.500 (0.500 .. 0.500, bar 0.85), wall ratio 0.500, and more"
    )


def test_pairs_that_are_only_named_do_not_run_by_themselves() -> None:
    assert pairs.parser("zero", "").parse_args([]).pairs == ["stage0", "stage1", "stage2", "stage3"]
    assert pairs.parser("zero", "").parse_args(["--pairs", "local"]).pairs == ["local"]
