"""The examples as their readers start them: torchrun makes the ranks, `mesh.start` the process group."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).parents[3] / "examples"


def _run(folder: Path, ranks: int, example: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--monitor-interval", "0.05", str(_EXAMPLES / example), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        ("parallelize.py", ("mesh.tp=2", "parallel.sequence=true", "batch.micro=16")),
        pytest.param("data_parallel.py", ("3",), marks=pytest.mark.prove),
    ],
)
def test_examples_learn(tmp_path: Path, example: str, arguments: tuple[str, ...]) -> None:
    losses = _losses(_run(tmp_path, 2, example, *arguments))
    assert len(losses) >= 4
    assert losses[-1] < losses[0] / 3
    if example == "parallelize.py":
        assert (tmp_path / "runs" / "counting" / "latest").exists()
