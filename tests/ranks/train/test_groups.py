"""B38 (PaddlePaddle/Paddle#68847): which process groups the ranks of a whole run make, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import distributed_c10d

from meshwright.launch.status import RankStatus
from meshwright.layout.communicators import communicators
from meshwright.plan.strategies.context import ulysses_ways
from meshwright.plan.strategies.tensor import kv_copies
from meshwright.testing.ranks import run_cases
from meshwright.train.job import Job
from meshwright.train.loop import train_joined
from tests.ranks.train.jobs import evaluations, tiny_job

WORLD = 4
Made = tuple[tuple[int, ...], str, bool]
"""(ranks, what it is told as, whether this rank is in it)."""


class Counting(RankStatus):
    """Notes how many process groups torch knows wherever the run says where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, set[int]] = {}

    def at(self, step: int | None, phase: str) -> None:
        super().at(step, phase)
        if step is not None:
            self.known.setdefault(step, set()).add(len(distributed_c10d._world.pg_map))


def groups_of_a_run(rank: int, job: Job) -> tuple[list[Made], list[int | None], dict[int, set[int]]]:
    """What was made, at which step, and the groups known during each; evaluations and saves included."""
    made: list[Made] = []
    when: list[int | None] = []
    status, plain = Counting(), dist.new_group

    def new_group(ranks: list[int] | None = None, **more: Any) -> Any:
        group = plain(ranks, **more)
        members = tuple(range(WORLD) if ranks is None else ranks)
        made.append((members, more["group_desc"], isinstance(group, dist.ProcessGroup)))
        when.append(status.step)
        return group

    with patch.object(dist, "new_group", new_group):
        train_joined(status, job)
    return made, when, status.known


LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "pp 2 x tp 2, key heads copied": {"mesh": {"dp": 1, "pp": 2, "tp": 2}, "model": {"kv_heads": 1}},
    "pp 2 x dp 2, tied": {"mesh": {"dp": 2, "pp": 2}, "model": {"tie_embeddings": True}, "parallel": {"zero": 1}},
    "hybrid": {"mesh": {"dp": 4}, "parallel": {"zero": 2, "zero_shard_within": 2}},
    "interleaved": {
        "mesh": {"dp": 1, "pp": 4}, "model": {"layers": 8}, "parallel": {"schedule": "interleaved", "chunks": 2},
    },
}  # fmt: skip


def test_groups_are_made_once_at_the_start_in_one_order_by_all(tmp_path: Path) -> None:
    jobs = []
    for number, sections in enumerate(LAYOUTS.values()):
        keys: dict[str, Any] = {"checkpoint": {"every": 1}, "train": {"steps": 2, "eval_every": 1}, **sections}
        jobs.append(tiny_job(tmp_path, WORLD, f"run-{number}", **keys))
    results = run_cases(groups_of_a_run, WORLD, jobs, timeout=110)
    for number, (name, job) in enumerate(zip(LAYOUTS, jobs, strict=True)):
        plan = job.plan
        copies, inner = kv_copies(plan.degrees, plan.arch), ulysses_ways(plan.degrees.cp, plan.context)
        listed = communicators(plan.degrees, plan.sharding.within, copies, inner)
        wanted = [(each.ranks, each.told) for each in listed if len(each.ranks) < WORLD or each.link is not None]
        wanted.append((tuple(range(WORLD)), "side"))  # of saves; whatever joins all ranks else is the world itself
        for rank, of_rank in enumerate(results):
            made, when, known = of_rank[number]
            assert [each[:2] for each in made] == wanted, f"{name}, rank {rank}"
            assert [member for _, _, member in made] == [rank in ranks for ranks, _ in wanted], name
            assert set(when) == {None}, f"{name}: made during a step"
            assert len(set().union(*known.values())) == 1, f"{name}: {known}"
            assert sorted(known) == [0, 1]
        assert len(evaluations(job)) == 2
