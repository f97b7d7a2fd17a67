"""What each rank of the two nodes runs: several layouts one after another, in one process group, and all again.

A machine that others use is slower for seconds at a time: in rounds such a while is one of every layout's, and a median
over all rounds leaves it out.

python -m tests.cluster.laps CASES.json RESULTS.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from meshwright.arch.resolve import arch_from_model
from meshwright.comm.mesh import Mesh
from meshwright.config.load import build_run
from meshwright.launch.environment import detect
from meshwright.launch.join import join, leave
from meshwright.launch.rank import prepare
from meshwright.parallel.engine import Engine
from meshwright.plan.learning_rate import learning_rate
from meshwright.plan.resolve import resolve
from meshwright.train.feed import rank_feed
from meshwright.train.job import job_of

_WARM_UP = 1


def laps(tables: dict[str, Any], steps: int) -> list[float]:
    """Seconds of each step of a layout, between barriers, as this rank sees them."""
    run = build_run(tables)
    plan = resolve(run, arch_from_model(run.model))
    mesh = Mesh.of(plan).start()
    feed = rank_feed(job_of(run, plan), mesh.rank)
    engine = Engine(plan, mesh, "cpu")
    seconds = []
    for step in range(_WARM_UP + steps):
        batch = feed.batch(step)
        dist.barrier()
        begin = time.perf_counter()
        engine.step(batch, learning_rate(plan.optimizer, step))
        seconds.append(time.perf_counter() - begin)
    mesh.close()
    return seconds[_WARM_UP:]


def main(cases: Path, results: Path) -> None:
    """Every case of the file, in rounds; rank 0 tells medians as they come, and writes the seconds of all steps."""
    place = detect()
    assert place is not None
    prepare(num_threads=1)
    join(place)
    asked = json.loads(cases.read_text())
    done: list[list[float]] = [[] for _ in asked["runs"]]
    for _ in range(asked["rounds"]):
        for tables, seconds in zip(asked["runs"], done, strict=True):
            seconds += laps(tables, asked["steps"])
            if place.rank == 0:
                print(f"{median(seconds):.3f}", flush=True)
    if place.rank == 0:
        results.write_text(json.dumps(done))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
