"""A request that is wrong: exit code 2 on every rank and one message in all, wherever it is noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.testing.models import m0_bytes, overrides
from tests.ranks.launch.launched import srun

_TELLS_TORCH = """
import sys
from meshwright.cli.main import main
code = main(sys.argv[1:])
print("torch" in sys.modules)
sys.exit(code)
"""


def _train(folder: Path, **sections: dict[str, object]) -> list[str]:
    (folder / "text.txt").write_text("one line of text after another\n" * 40)
    tables = m0_bytes(
        data={"source": str(folder / "text.txt"), "sequence_length": 16, **sections.get("data", {})},
        mesh=sections.get("mesh", {"dp": 2}),
        batch={"global": 4, "micro": 1},
        train={"output": str(folder / "runs"), "device": "cpu", "steps": 2, **sections.get("train", {})},
    )
    return ["train", *overrides(tables)]


def _noticed_before_torch(folder: Path) -> dict[str, tuple[list[str], str]]:
    taken = folder / "taken"
    (taken / "m0").mkdir(parents=True)
    (taken / "m0" / "notes.txt").write_text("mine")
    return {
        "an unknown key": ([*_train(folder), "mesh.dq=2"], "mesh.dq"),
        "ranks that do not fit": (_train(folder, mesh={"dp": 4}), "2 ranks were started"),
        "data that are not there": (_train(folder, data={"source": f"{folder}/none.txt"}), "no such file"),
        "a folder of something else": (_train(folder, train={"output": str(taken)}), "holds no run of this program"),
    }


@pytest.mark.parametrize(
    "what", ["an unknown key", "ranks that do not fit", "data that are not there", "a folder of something else"]
)
def test_ranks_of_a_launcher_refuse_alike_and_tell_once(what: str, tmp_path: Path) -> None:
    words, told = _noticed_before_torch(tmp_path)[what]
    first, second = srun(2, *words, program=("-c", _TELLS_TORCH))
    assert (first.code, second.code) == (2, 2), first.err + second.err
    assert told in first.err
    assert first.err.startswith("error: ")
    assert second.err == ""
    assert (first.out, second.out) == ("False\n", "False\n")


def _unwritable(folder: Path) -> list[str]:
    """Its run folder cannot be made, which only rank 0 notices, and only when it makes it."""
    (folder / "file").write_text("")
    return _train(folder, train={"output": str(folder / "file" / "runs")})


def _cached_elsewhere(folder: Path) -> Path:
    """A launch that takes the same corpus from token files, for which no cache is written."""
    import numpy as np

    tokens = folder / "tokens.npy"
    np.save(tokens, (np.arange(2000) % 200).astype(np.uint16))
    return tokens


@pytest.mark.prove
def test_what_one_rank_notices_is_told_by_it_alone(tmp_path: Path) -> None:
    words = [*_unwritable(tmp_path), f"data.source={_cached_elsewhere(tmp_path)}"]
    first, second = srun(2, *words)
    assert (first.code, second.code) == (2, 2), first.err + second.err
    assert first.err.splitlines()[-1].startswith(f"error: {tmp_path}/file/runs/m0: cannot be written")
    assert "error" not in second.err
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == first.err.splitlines()[-1]
    assert done.stderr.count("cannot be written") == 1


def test_a_launched_training_says_its_outcome_once(tmp_path: Path) -> None:
    first, second = srun(2, *_train(tmp_path), "--json")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert json.loads(first.out)["steps"] == 2
    assert second.out == ""
