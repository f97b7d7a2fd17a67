"""Two nodes in namespaces: what crosses is shaped, what stays is not, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.layouts import drawn, kendall, near, plan_of, pool
from tests.cluster.nodes import left_behind, missing, two_nodes

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def _only_where_nodes_can_be_made() -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


def test_what_crosses_is_shaped_and_what_stays_is_not(tmp_path: Path) -> None:
    run = ["mesh.dp=2", "mesh.tp=2", "train.device=cpu"]
    with two_nodes(50e6) as nodes:
        told = nodes.run([sys.executable, "-m", "meshwright", "doctor", *run, "--json"], 60)
    axes = json.loads(told[told.index("{") :])["axes"]
    assert axes["dp"]["bytes_per_s"] == pytest.approx(25e6, rel=0.2)  # both ranks of a node send at once
    assert axes["tp"]["bytes_per_s"] > 4 * axes["dp"]["bytes_per_s"]
    assert not left_behind()


def test_a_failing_rank_tells_and_leaves_nothing() -> None:
    with pytest.raises(AssertionError, match="no such thing"), two_nodes(50e6) as nodes:
        nodes.run(["sh", "-c", "echo no such thing; exit 3"], 20)
    assert not left_behind()


def test_a_killed_test_leaves_nothing() -> None:
    script = (
        "import os, time; from tests.cluster.nodes import two_nodes\n"
        "with two_nodes(50e6) as nodes: print(os.getpid(), flush=True); time.sleep(60)"
    )
    started = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    assert _namespaces(pid)
    os.kill(pid, signal.SIGKILL)
    started.wait()
    started.stdout.close()
    deadline = time.monotonic() + 10
    while _namespaces(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _namespaces(pid)


def test_draws_are_the_commits_own() -> None:
    every = pool()
    assert len(every) > 30
    for run in every:
        assert plan_of(run).degrees.ranks == 4
    seconds = [1 + 0.05 * index for index in range(len(every))]
    assert drawn("a", seconds) == drawn("a", seconds) != drawn("b", seconds)
    assert near([seconds[index] for index in drawn("a", seconds)]) >= 4
    assert kendall([1, 2, 3], [1, 2, 3]) == 1
    assert kendall([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)


def _namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"mw-{pid}-")]
