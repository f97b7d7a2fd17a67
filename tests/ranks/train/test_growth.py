"""Nothing is kept of past steps: memory and open files stay what they were."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.launch.status import RankStatus
from meshwright.testing.ranks import run
from meshwright.train.feed import Feed
from meshwright.train.job import Job
from meshwright.train.loop import train_joined
from tests.ranks.train.jobs import tiny_job

WARM, STEPS = 100, 300
MOST_BYTES = 1 << 20  # a hundred steps


def watched(rank: int, job: Job) -> tuple[list[int], list[int]]:
    """(resident bytes, open files) of this rank as it begins steps WARM and STEPS - 1."""
    resident: list[int] = []
    files: list[int] = []
    plain = Feed.batch

    def batch(self: Feed, step: int):  # type: ignore[no-untyped-def]
        if step in (WARM, STEPS - 1):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident.append(pages * os.sysconf("SC_PAGE_SIZE"))
            files.append(len(list(Path("/proc/self/fd").iterdir())))
        return plain(self, step)

    Feed.batch = batch  # type: ignore[method-assign]
    try:
        train_joined(RankStatus(), job)
    finally:
        Feed.batch = plain  # type: ignore[method-assign]
    return resident, files


def test_memory_and_files_do_not_grow_with_steps(tmp_path: Path) -> None:
    job = tiny_job(
        tmp_path, 2, train={"steps": STEPS, "eval_every": 0, "log_every": 1000},
        precision={"compute": "float32"}, batch={"global": 2},
    )  # fmt: skip
    for resident, files in run(watched, 2, job, timeout=110):
        assert resident[1] - resident[0] < MOST_BYTES * (STEPS - WARM) / 100
        assert files[1] == files[0]
