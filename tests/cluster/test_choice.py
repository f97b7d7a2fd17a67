"""The choice, proved on a cluster: twelve layouts are priced after calibration, then run; both are held together.

On a quiet machine, at ordinary priority: under a real-time one a rank that waits for a message keeps its core from the
rank that is to send it, and calibrated latencies are those of the scheduler.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest
import tomli_w

from meshwright.price.catalogue import cluster_of
from meshwright.price.cluster import Cluster
from meshwright.price.price import price
from tests.cluster.layouts import LINK_BYTES_PER_S, Tables, commit, drawn, kendall, near, plan_of, pool, tables
from tests.cluster.nodes import Nodes, missing, two_nodes

pytestmark = [pytest.mark.cluster, pytest.mark.prove, pytest.mark.timeout(900)]

_ROUNDS, _STEPS = 4, 3
_INSIDE = tables(dp=2, tp=2, sequence=True)
_ACROSS = tables(dp=2, tp=2, sequence=True, order=("tp", "pp", "dp", "ep", "cp"))


@dataclass(frozen=True)
class Lap:
    """Seconds of a step of one layout."""

    run: Tables
    planned: float
    measured: float

    def __str__(self) -> str:
        mesh = {axis: size for axis, size in self.run["mesh"].items() if axis != "order" and size > 1}
        outer = next(axis for axis in self.run["mesh"]["order"] if self.run["mesh"].get(axis, 1) > 1)
        told = f"{mesh} {outer} across, {self.run['parallel']}, micro {self.run['batch']['micro']}"
        return f"{self.planned:.3f} s planned, {self.measured:.3f} s measured ({self.error:+.1%})  {told}"

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


@pytest.fixture(scope="module")
def laps(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Lap], Lap, Lap]:
    """The drawn twelve, then tensor inside and across."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("two-nodes")
    with two_nodes(LINK_BYTES_PER_S) as nodes:
        cluster = _calibrated(nodes, folder)
        every = pool()
        planned = [price(plan_of(run), cluster).step_seconds for run in every]
        chosen = [every[index] for index in drawn(commit(), planned)]
        runs = [*chosen, _INSIDE, _ACROSS]
        seconds = [price(plan_of(run), cluster).step_seconds for run in runs]
        found = [Lap(*each) for each in zip(runs, seconds, _measured(nodes, runs, folder), strict=True)]
    print("\n".join(["", f"{len(every)} layouts, drawn by {commit()[:12]}", *map(str, found)]))
    return found[:-2], found[-2], found[-1]


def _calibrated(nodes: Nodes, folder: Path) -> Cluster:
    """What `doctor --calibrate` writes of both nodes."""
    run, file = folder / "run.toml", folder / "two-nodes.toml"
    run.write_text(tomli_w.dumps(_INSIDE))
    nodes.run([sys.executable, "-m", "meshwright", "doctor", str(run), "--calibrate", "--out", str(file)], 120)
    return cluster_of(str(file))


def _measured(nodes: Nodes, runs: list[Tables], folder: Path) -> list[float]:
    """The median step of each, over all rounds."""
    cases, results = folder / "cases.json", folder / "results.json"
    cases.write_text(json.dumps({"runs": runs, "rounds": _ROUNDS, "steps": _STEPS}))
    nodes.run([sys.executable, "-m", "tests.cluster.laps", str(cases), str(results)], 500)
    return [median(each) for each in json.loads(results.read_text())]


def test_near_layouts_were_drawn(laps: tuple[list[Lap], Lap, Lap]) -> None:
    assert near([lap.planned for lap in laps[0]]) >= 4


def test_the_ranking_is_the_measured_one(laps: tuple[list[Lap], Lap, Lap]) -> None:
    tau = kendall([lap.planned for lap in laps[0]], [lap.measured for lap in laps[0]])
    assert tau >= 0.8, "\n".join([f"Kendall's tau {tau:.2f}", *map(str, laps[0])])


def test_step_times_are_as_planned(laps: tuple[list[Lap], Lap, Lap]) -> None:
    off = [lap for lap in laps[0] if abs(lap.error) > 0.15]
    assert not off, "\n".join(map(str, off))


def test_tensor_inside_against_across(laps: tuple[list[Lap], Lap, Lap]) -> None:
    _, inside, across = laps
    planned, measured = across.planned / inside.planned, across.measured / inside.measured
    assert (planned > 1) == (measured > 1), f"{inside}\n{across}"
    assert planned / measured == pytest.approx(1.0, abs=0.2), f"{inside}\n{across}"
