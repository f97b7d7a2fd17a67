"""Under torchrun: a killed rank, a restart in the same store, and ranks that meet again.

Plain torch 2.13 recovers in about one of five tries here: the launcher's store keeps the dead attempt's addresses.
"""

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]


def _restart() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    program = ["--monitor-interval", "0.05", "-m", "tests.ranks.launch.programs", "dies_once"]
    done = subprocess.run([*command, *program], cwd=_ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ended = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert ended == ["rank 0 ended attempt 1", "rank 1 ended attempt 1"]


def test_a_restart_meets_again() -> None:
    _restart()


@pytest.mark.prove
@pytest.mark.parametrize("attempt", range(20))
def test_twenty_restarts_of_twenty_meet_again(attempt: int) -> None:
    _restart()
