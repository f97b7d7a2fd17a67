"""`bench`: what is chosen, refused and told, with figures made up; the catalogue agrees with the scripts."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import benchmarks
from meshwright.cli.commands import bench
from meshwright.cli.main import main
from meshwright.config.errors import RequestError
from meshwright.launch.environment import Launcher, Place, detect, snapshot_of

ROOT = Path(__file__).parents[3]
CATALOGUE = benchmarks.read(ROOT / "benchmarks")


def chosen(*names: str, ranks: int | None = None) -> list[str]:
    return [pair.word for each in benchmarks.choose(CATALOGUE, names, ranks) for pair in each.pairs]


def row(ours: float, theirs: float, bar: float | None, peer: str = "peer", ranks: int = 2) -> dict[str, Any]:
    figures: dict[str, Any] = {"peer": peer, "ranks": ranks, "bar": bar}
    for kind in ("cpu", "wall"):
        ratio = ours / theirs
        figures |= {f"ours_{kind}_seconds": ours, f"theirs_{kind}_seconds": theirs, f"{kind}_ratio": ratio}
        figures |= {f"{kind}_ratio_low": ratio - 0.01, f"{kind}_ratio_high": ratio + 0.01}
    return figures


MACHINE = {"cpu": "A processor", "cores": 2, "torch": "2.13.0", "python": "3.11", "priority": "ordinary"}


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Stands for the scripts: what each shall write, and with which code it shall end; returns what was started."""

    def stand_in(written: dict[str, dict[str, Any]], codes: dict[str, int] | None = None) -> list[list[str]]:
        started: list[list[str]] = []

        def start(words: list[str], root: Path, scratch: str, place: Any) -> int:
            started.append(words)
            name = Path(words[0]).stem if words[0] != "-m" else words[1].partition(".")[2]
            if name in written:
                Path(words[words.index("--json") + 1]).write_text(json.dumps(written[name]))
            return (codes or {}).get(name, 0)

        monkeypatch.setattr(bench, "_start", start)
        return started

    return stand_in


def test_names_are_benchmarks_and_pairs_in_the_catalogues_order() -> None:
    assert chosen("tensor.tp2", "zero.stage3", "zero.stage0", "tensor.tp2") == [
        "zero.stage0", "zero.stage3", "tensor.tp2",
    ]  # fmt: skip
    assert chosen("zero") == ["zero.stage0", "zero.stage1", "zero.stage2", "zero.stage3"]
    assert chosen("zero", "zero.local")[-1] == "zero.local"
    assert {word.partition(".")[0] for word in chosen("all")} == {each.name for each in CATALOGUE}
    assert chosen() == ["zero.stage0", "zero.stage3", "tensor.tp2", "pipeline.1f1b"]


def test_ranks_take_the_pairs_of_a_benchmark_that_run_on_so_many() -> None:
    assert chosen("tensor", ranks=4) == ["tensor.dp2tp2"]
    assert chosen(ranks=4) == ["zero.stage0", "zero.stage3"]


@pytest.mark.parametrize(
    ("names", "ranks", "told"),
    [
        (["stage3"], None, "stage3: is no benchmark; what works: zero.stage3"),
        (["tensr"], None, "tensr: is no benchmark; what works: tensor"),
        (["zero.stage9"], None, "zero.stage9: is no benchmark; what works: zero.stage"),
        (["tensor.tp2"], 4, "--ranks 4: tensor.tp2 runs on 2; what works: --ranks 2"),
        (["zero"], 3, "--ranks 3: zero runs on 2 or 4 or 8; what works: --ranks 2, --ranks 4, --ranks 8"),
        ([], 3, "--ranks 3: what runs without a name runs on 2 or 4 or 8"),
    ],
)
def test_what_there_is_not_is_refused(names: list[str], ranks: int | None, told: str) -> None:
    with pytest.raises(RequestError) as error:
        benchmarks.choose(CATALOGUE, names, ranks)
    assert str(error.value).startswith(told)


def test_a_missing_peer_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"zero.deepspeed2: needs deepspeed, .*; what works: pip install deepspeed"):
        benchmarks.choose(CATALOGUE, ["zero.deepspeed2"], None)
    assert chosen("zero")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rounds", "0"], "0 is no number of at least 1"),
        (["--ranks", "two"], "two is no number"),
        (["price.speed", "--rounds", "3"], "--rounds 3: price has no rounds"),
        (["--list", "zero"], "--list: tells everything"),
    ],
)
def test_wrong_requests(words: list[str], told: str, capsys: pytest.CaptureFixture[str], scripts: Any) -> None:
    started = scripts({})
    assert main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert told in err
    assert len(err.splitlines()) == 1
    assert out == ""
    assert not started


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["zero", "--ranks", "4"], "--ranks 4: the launcher started 2; what works: --ranks 2, no --ranks"),
        (["tensor.dp2tp2"], "--ranks 2: tensor.dp2tp2 runs on 4"),
        (["price"], "--ranks 2: price runs on 1"),
    ],
)
def test_a_launchers_ranks_run_what_runs_on_so_many(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = scripts({})
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "2000"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", *words]) == 2
    assert told in capsys.readouterr().err
    assert not started


def test_a_script_stands_in_for_a_rank() -> None:
    """Under Slurm too: it finds the place of its rank, and comes to a store that is served already."""
    place = Place(3, 4, 1, "node1", 21000, Launcher.SLURM, run_id="slurm-7-0")
    found = detect(snapshot_of(place))
    assert found is not None
    assert found == replace(place, launcher=Launcher.TORCHRUN, agent_store=True, restart_count=found.restart_count)


def test_a_package_without_its_checkout_says_so(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"needs the benchmarks of a source checkout.*editable"):
        benchmarks.find_folder(tmp_path / "lib" / "meshwright")


def test_scripts_are_started_with_their_own_words(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    zero, tensor, price = benchmarks.choose(CATALOGUE, ["zero.stage1", "tensor.tp2", "price.speed"], None)
    asked = ["--rounds", "3", "--json", str(file)]
    assert benchmarks.words(zero, None, 3, file) == [
        "benchmarks/zero.py", "--pairs", "stage1", *asked, "--ranks", "2",
    ]  # fmt: skip
    assert benchmarks.words(zero, 4, 3, file)[-1] == "4"
    assert benchmarks.words(tensor, None, 3, file) == ["benchmarks/tensor.py", "--pairs", "tp2", *asked]
    assert benchmarks.words(price, None, 3, file) == [
        "-m", "benchmarks.price", "--only", "speed", "--json", str(file),
    ]  # fmt: skip


def test_the_table(capsys: pytest.CaptureFixture[str], scripts: Any) -> None:
    """A missed bar is told, and is no failure."""
    started = scripts(
        {
            "zero": {
                "hardware": MACHINE,
                "pairs": {"stage0": row(0.8, 0.8, 1.0, "DDP"), "stage1": row(0.9, 0.9, 0.97)},
            },
            "tensor": {"hardware": MACHINE, "pairs": {"tp2": row(0.5, 1.0, None, "DTensor")}},
        }
    )
    assert main(["bench", "zero.stage0", "zero.stage1", "tensor.tp2", "--rounds", "3"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", told[0]) == list(bench._HEAD)
    lines = [line.split() for line in told]
    assert lines[1] == ["zero.stage0", "0.800", "0.800", "1.000", "0.990", "..", "1.010", "1.00", "yes", "DDP"]
    assert lines[2] == ["zero.stage1", "0.900", "0.900", "1.000", "0.990", "..", "1.010", "0.97", "no", "peer"]
    assert lines[3] == ["tensor.tp2", "0.500", "1.000", "0.500", "0.490", "..", "0.510", "-", "-", "DTensor"]
    assert lines[4][-3:] == ["paired", "rounds:", "3"]
    assert len(started) == 2


def test_one_json_object(capsys: pytest.CaptureFixture[str], scripts: Any) -> None:
    speed = {"layouts_per_second": 7}
    scripts(
        {
            "tensor": {"hardware": MACHINE, "pairs": {"tp2": row(0.5, 1.0, 0.85)}},
            "price": {"tables": {"speed": "seven a second"}, "figures": {"speed": speed}},
        }
    )
    assert main(["bench", "tensor.tp2", "price.speed", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["failed"] == []
    assert found["hardware"] == MACHINE
    assert found["pairs"]["tensor.tp2"] == row(0.5, 1.0, 0.85) | {"met": True}
    assert found["tables"] == {"price.speed": {"text": "seven a second", "figures": speed}}


def test_a_script_that_fails_leaves_the_others_and_exits_1(capsys: pytest.CaptureFixture[str], scripts: Any) -> None:
    """What it had measured until then is told."""
    half = {"hardware": MACHINE, "pairs": {"tp2": row(0.5, 1.0, 0.85)}}
    whole = {"hardware": MACHINE, "pairs": {"1f1b": row(0.9, 1.0, 0.95)}}
    scripts({"tensor": half, "pipeline": whole}, {"tensor": 1})
    assert main(["bench", "tensor.tp2", "tensor.tp2sp", "pipeline.1f1b"]) == 1
    out, err = capsys.readouterr()
    assert err == "error: tensor: its script ended with exit code 1\n"
    assert "tensor.tp2sp  failed" in out.splitlines()
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["tensor.tp2", "pipeline.1f1b"]


def test_the_list_tells_every_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(pair.word in out and pair.peer in out for each in CATALOGUE for pair in each.pairs)
    assert main(["bench", "--list", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["benchmarks"]] == [e.name for e in CATALOGUE]


@pytest.mark.parametrize("name", ["zero", "tensor", "pipeline"])
def test_scripts_have_the_pairs_of_the_catalogue(name: str) -> None:
    tree = ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text())
    tables = [
        node.value for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "PAIRS"
    ]
    assert isinstance(tables[0], ast.Dict)
    there = {ast.literal_eval(key) for key in tables[0].keys if key is not None}
    assert there == {pair.name for each in CATALOGUE if each.name == name for pair in each.pairs}


_SCRIPT = """
import os, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[1], "w").write(f"{os.getpid()} {rank.pid}")
time.sleep(60)
"""
_STARTER = """
import signal, sys
from pathlib import Path
from meshwright.cli.commands import bench
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
with bench._sigterm_raises():
    bench._start(["-c", sys.argv[1], sys.argv[2]], Path("."), ".")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_script_and_its_ranks(number: signal.Signals, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    words = [sys.executable, "-c", _STARTER, _SCRIPT, str(note)]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL, cwd=tmp_path) as process:
        until(lambda: note.exists() and len(note.read_text().split()) == 2)
        process.send_signal(number)
        code = process.wait(20)
    assert code == (143 if number is signal.SIGTERM else -signal.SIGINT)
    for pid in map(int, note.read_text().split()):
        until(lambda pid=pid: not alive(pid))  # type: ignore[misc]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
