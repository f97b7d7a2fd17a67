"""`plan` and `convert` as users and programs call them. No torch."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from meshwright.cli.main import main

SMALL = ["model.preset=llama3-8b", "data.sequence_length=4096", "batch.global=32", "precision.compute=bfloat16",
         "mesh.cp=1", "--cluster", "h100-sxm", "--gpus", "16"]  # fmt: skip


def test_json_has_exactly_the_documented_keys_and_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", *SMALL, "--json", "--top", "3", "--tokens", "1e9", "--mtbf-hours", "1e4", "--lose-node", "1"])
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert {"layouts", "refused", "counts", "advice", "seconds"} <= set(told)
    assert [row["rank"] for row in told["layouts"]] == [1, 2, 3]
    assert set(told["layouts"][0]) == {
        "rank",
        "mesh",
        "parallel",
        "batch",
        "memory_peak",
        "step_seconds",
        "mfu",
        "cost",
    }
    assert {"enumerated", "legal", "fitting"} <= set(told["counts"])
    assert all({"mesh", "rule", "nearest", "count"} == set(row) for row in told["refused"])
    assert told["layouts"][0]["mesh"]["cp"] == 1
    assert told["budget"]["steps"] == -(-(10**9) // (32 * 4096))
    assert 0.9 < told["goodput"]["goodput"] < 1
    assert {"what", "coordinates", "holders"} == set(told["lose_node"][0])


def test_text_explains_and_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best, page = tmp_path / "best.toml", tmp_path / "plan.html"
    assert main(["plan", *SMALL, "--top", "2", "--write", str(best), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    for heading in ("by time:", "why:", "habit:", "links:", "refused:", "decision tree", "order of growth"):
        assert heading in out
    assert page.read_text().startswith("<!doctype html>")
    first = re.search(r"(?m)^   1  (.*? s)  .*  (dp .*)$", out)
    assert first is not None
    assert main(["estimate", str(best), "--cluster", "h100-sxm", "--gpus", "16"]) == 0
    assert re.search(rf"(?m)^time of a step  {first[1].strip()} ", capsys.readouterr().out)  # the first of the ranking


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpus", "16", "--cluster", "h100"], "h100-sxm"),
        (["mesh.dp=fill"], "--gpus N"),
        ([*SMALL, "--lose-rank", "16"], "0 to 15"),
        ([*SMALL, "mesh.tp=5"], "no legal layout"),
    ],
)
def test_wrong_requests_are_refused_in_one_message(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert told in capsys.readouterr().err


def test_convert_prints_the_text_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}')
    assert main(["convert", str(file), "--from", "deepspeed", "--to", "meshwright"]) == 0
    out, err = capsys.readouterr()
    assert tomllib.loads(out)["mesh"]["dp"] == 4
    assert "note: loss" in err
    assert main(["convert", str(tmp_path / "none"), "--from", "deepspeed", "--to", "meshwright"]) == 2


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys; from meshwright.cli.main import main; "
        "assert main(['plan', '--gpus', '2', '--top', '1']) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan", *SMALL, "--html", "nowhere/page.html"], "no folder nowhere"),
        (["plan", *SMALL, "--write", "."], "is a folder"),
        (["convert", "run.toml", "--from", "meshwright", "--to", "megatron", "--out", "nowhere/x"], "no folder"),
        (["doctor", "--calibrate", "--out", "nowhere/x.toml"], "no folder"),
        (["plan", *SMALL, "--tokens", "many"], "no number above 0"),
        (["plan", *SMALL, "--checkpoint-seconds", "4"], "--mtbf-hours"),
        (["plan", *SMALL, "--restart-seconds", "4"], "--mtbf-hours"),
        (["estimate", "mesh.dp=2", "--why", ""], "no figure"),
        (["plan", *SMALL, "--lose-rank", "16"], "--lose-rank 16: is not there; what works: 0 to 15"),
        (["plan", *SMALL, "--gpus", "8", "--lose-node", "1"], "--lose-node 1: is not there; what works: 0"),
        (["estimate", "mesh.dp=fill"], "--gpus N"),
        (["estimate", "optimizer.kind=muon"], 'optimizer.kind = "adamw"'),
        (["plan", "optimizer.kind=muon", "--gpus", "2"], 'optimizer.kind = "muon": has no price'),
        (["estimate", "mesh.dp=fill", "mesh.tp=3", "--gpus", "8"], "--gpus 9"),
    ],
)
def test_mistakes_are_told_before_any_work(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is not there was told after the search, with exit code 1."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("error:")) == ("", 1)
    assert told in err
    assert "--ranks" not in err


def test_an_estimate_says_in_what_precision(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "mesh.dp=2", "batch.global=8", "batch.micro=4"]) == 0
    assert "1 micro-batch of 4 x 256 tokens, float32" in capsys.readouterr().out
