"""`bench` on the ranks of a launcher: real torchrun, simulated Slurm; one table, of rank 0."""

from __future__ import annotations

import json

import pytest

from tests.ranks.launch.launched import srun, torchrun


@pytest.mark.prove
@pytest.mark.timeout(170)
def test_two_ranks_of_torchrun_measure_together() -> None:
    done = torchrun(2, "bench", "zero.stage0", "--rounds", "1", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["ok"]
    row = found["pairs"]["zero.stage0"]
    assert row["ranks"] == 2
    assert row["ours_cpu_seconds"] > 0
    assert row["theirs_cpu_seconds"] > 0
    assert done.err.count("stage0: CPU") == 1


@pytest.mark.prove
@pytest.mark.timeout(170)
def test_slurms_ranks_meet_again_for_every_script() -> None:
    """Two scripts, one store; the folder of the second is rank 0's."""
    first, second = srun(2, "bench", "zero.stage0", "offload.optimizer-disk", "--rounds", "1")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    lines = [line.split()[0] for line in first.out.splitlines()]
    assert lines[:3] == ["pair", "zero.stage0", "offload.optimizer-disk"]
    assert second.out == ""
