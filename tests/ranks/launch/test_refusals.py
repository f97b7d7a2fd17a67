"""A request that is wrong: exit code 2 on every rank and one message in all, wherever it is noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshwright.testing.models import m0_bytes, overrides
from tests.ranks.launch.launched import Ended, srun

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


def _tiny(command: str, *words: str, mesh: dict[str, int]) -> list[str]:
    tables = m0_bytes(
        mesh=mesh, batch={"global": 4, "micro": 2}, data={"sequence_length": 8}, precision={"compute": "float64"}
    )
    return [command, *overrides(tables), *words]


_NO_TORCH = ("an unknown key", "ranks that do not fit", "data that are not there", "a folder of something else")
_REFUSED = (*_NO_TORCH, "a twin of more ranks", "what needs no ranks", "a pair of other ranks")


def _requests(folder: Path) -> dict[str, tuple[list[str], str]]:
    """Words that two ranks are started with, and how what they are told begins."""
    taken = folder / "taken"
    (taken / "m0").mkdir(parents=True)
    (taken / "m0" / "notes.txt").write_text("mine")
    none = f"{folder}/none.txt"
    fitting = "a mesh of dp 4 x tp 1 x pp 1 x cp 1 x ep 1 = 4 ranks: 2 ranks were started"
    twin = "verify on 2 ranks of a launcher: with dp and tp the smallest twin of this run"
    return {
        "an unknown key": ([*_train(folder), "mesh.dq=2"], "mesh.dq: is no key of [mesh]"),
        "ranks that do not fit": (_train(folder, mesh={"dp": 4}), fitting),
        "data that are not there": (
            _train(folder, data={"source": none}),
            f'data.source = "{none}": there is no such file',
        ),
        "a folder of something else": (_train(folder, train={"output": str(taken)}), str(taken / "m0")),
        "a twin of more ranks": (_tiny("verify", mesh={"dp": 2, "tp": 2}), twin),
        "what needs no ranks": (_tiny("verify", "--dry-run", mesh={"dp": 2}), "--dry-run: is no work for a launcher's"),
        "a pair of other ranks": (["bench", "tensor.dp2tp2"], "--ranks 2: tensor.dp2tp2 runs on 4"),
    }


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], str]]:
    return _requests(tmp_path_factory.mktemp("requests"))


@pytest.fixture(scope="module")
def refused(requests: dict[str, tuple[list[str], str]]) -> dict[str, list[Ended]]:
    """How both ranks of every request ended. At once: a rank that says nothing waits for the other to have told."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        started = {
            what: pool.submit(srun, 2, *words, program=("-c", _TELLS_TORCH)) for what, (words, _) in requests.items()
        }
    return {what: ended.result() for what, ended in started.items()}


@pytest.mark.parametrize("what", _REFUSED)
def test_ranks_of_a_launcher_refuse_alike_and_tell_once(
    what: str, requests: dict[str, tuple[list[str], str]], refused: dict[str, list[Ended]]
) -> None:
    first, second = refused[what]
    assert (first.code, second.code) == (2, 2), first.err + second.err
    assert first.err.startswith(f"error: {requests[what][1]}")
    assert second.err == ""
    if what in _NO_TORCH:
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
