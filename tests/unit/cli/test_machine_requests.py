"""Ranks that this machine cannot take are refused alike by every command that starts some, before it does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.cli.main import main
from meshwright.comm.mesh import Mesh
from meshwright.parallel.engine import Engine
from meshwright.plan.plan import Batch
from tests.unit.checkpoint.saved import plan_of, save

SOURCE = Path(__file__).parents[3] / "src" / "meshwright"
MANY = ["mesh.dp=4096", "batch.global=4096", "batch.micro=1"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("machine")
    plan = replace(plan_of(), batch=Batch(4096, 1))
    return str(save(Engine(plan, Mesh(1).start()), folder))


def refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    assert main(words) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert len(found.err.splitlines()) == 1, found.err
    return found.err


@pytest.mark.parametrize("command", ["train", "evaluate", "doctor"])
def test_far_more_ranks_than_cores(
    command: str, checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verify` proves a run of any size by a twin of few ranks."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    words = [checkpoint, MANY[0]] if command == "evaluate" else MANY
    told = refused(capsys, [command, *words])
    assert "4096 ranks on this machine of 2 cores: at most 128 are started on one machine" in told


@pytest.mark.parametrize("command", ["train", "verify", "doctor"])
@pytest.mark.parametrize(
    ("found", "rule"),
    [(0, "no CUDA device is found here"), (1, "each takes a CUDA device of its own, and this machine")],
)
def test_no_device_for_each_rank(
    command: str,
    found: int,
    rule: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    (tmp_path / "text.txt").write_text("some text " * 1000)
    run = [f"data.source={tmp_path}/text.txt", f"train.output={tmp_path}/runs", "data.sequence_length=32"]
    assert rule in refused(capsys, [command, "mesh.dp=2", "train.device=cuda", *run])


def test_who_starts_ranks_has_asked_the_machine() -> None:
    starts = [file for file in SOURCE.rglob("*.py") if re.search(r"import .*\brun_ranks\b", file.read_text())]
    ours = {file for file in starts if "testing" not in file.parts}  # faults are put into ranks of tests
    assert len(ours) >= 5
    asked = {file for file in ours if re.search(r"\bcheck_(machine|devices)\(", file.read_text())}
    assert ours == asked
