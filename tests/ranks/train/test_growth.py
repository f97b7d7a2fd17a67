"""Nothing is kept of past steps: memory and open files stay what they were."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.launch.status import RankStatus
from meshwright.testing.ranks import run
from meshwright.train.feed import Feed
from meshwright.train.job import Job
from meshwright.train.loop import train_joined
from tests.ranks.train.jobs import tiny_job

WARM, STEPS, MANY_STEPS = 200, 300, 2000  # by then every arena of the allocator has been touched
MOST_BYTES = 1 << 20  # a hundred steps
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "dp 2": {"mesh": {"dp": 2}},
    "zero 3": {"mesh": {"dp": 2}, "parallel": {"zero": 3}},
    "tp 2": {"mesh": {"dp": 1, "tp": 2}},
    "pp 2": {"mesh": {"dp": 1, "pp": 2}},
}


@dataclass(frozen=True)
class Seen:
    """What a rank held as it began a step, and the seconds of the 50 steps before."""

    resident: int
    files: int
    tensors: int
    works: int
    seconds: float


def seen(laps: list[float]) -> Seen:
    """Objects are counted before pages are: the list of all objects is memory as well."""
    gc.collect()
    alive = [type(each) for each in gc.get_objects()]
    tensors, works = (sum(issubclass(each, kind) for each in alive) for kind in (torch.Tensor, dist.Work))
    del alive
    files = len(list(Path("/proc/self/fd").iterdir()))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Seen(pages * os.sysconf("SC_PAGE_SIZE"), files, tensors, works, statistics.median(laps))


def watched(rank: int, job: Job) -> list[Seen]:
    """This rank as it begins step WARM and its last one."""
    found: list[Seen] = []
    laps: deque[float] = deque(maxlen=50)
    plain, begin = Feed.batch, [time.perf_counter()]

    def batch(self: Feed, step: int):  # type: ignore[no-untyped-def]
        laps.append(time.perf_counter() - begin[0])
        if step in (WARM, job.steps - 1):
            found.append(seen(list(laps)))
        begin[0] = time.perf_counter()
        return plain(self, step)

    Feed.batch = batch  # type: ignore[method-assign]
    try:
        train_joined(RankStatus(), job)
    finally:
        Feed.batch = plain  # type: ignore[method-assign]
    return found


def check_growth(folder: Path, layout: str, steps: int, timeout: float) -> list[tuple[Seen, ...]]:
    job = tiny_job(
        folder, 2, layout.replace(" ", ""), **LAYOUTS[layout], precision={"compute": "float32"}, batch={"global": 2},
        train={"steps": steps, "eval_every": 0, "log_every": 1000},
    )  # fmt: skip
    results = [tuple(of_rank) for of_rank in run(watched, 2, job, timeout=timeout)]
    for early, late in results:
        assert late.resident - early.resident < MOST_BYTES * (steps - WARM) / 100
        assert (late.files, late.tensors, late.works) == (early.files, early.tensors, early.works)
    return results


def test_memory_and_files_do_not_grow_with_steps(tmp_path: Path) -> None:
    check_growth(tmp_path, "dp 2", STEPS, timeout=110)


@pytest.mark.prove
@pytest.mark.timeout(700)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_grows_and_nothing_slows_down_over_many_steps(tmp_path: Path, layout: str) -> None:
    """Lists, graphs and requests kept from every step once made steps slower and slower."""
    for early, late in check_growth(tmp_path, layout, MANY_STEPS, timeout=680):
        assert late.seconds <= 1.3 * early.seconds
