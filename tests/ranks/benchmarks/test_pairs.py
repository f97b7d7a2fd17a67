"""Paired rounds on two real ranks: who steps when, what is kept, and that every rank reports."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from benchmarks import pairs


def measure(rank: int, ranks: int, rounds: int, warm_up: int) -> dict[str, Any]:
    """Sides that note their turns; the second sums over the ranks and works ten times as long."""
    turns: list[str] = []

    def first(batch: Any) -> float:
        turns.append(f"first {batch}")
        return 0.0

    def second(batch: Any) -> float:
        turns.append(f"second {batch}")
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        torch.ones(300, 300) @ torch.ones(300, 300)
        return float(total)

    taken = pairs.take_turns({"theirs": first, "ours": second}, lambda number: number, rounds, warm_up)  # type: ignore[arg-type, return-value]
    return {"turns": turns, "threads": torch.get_num_threads(), "taken": taken}


def test_sides_take_turns_and_the_warm_up_is_not_counted() -> None:
    found = pairs.launch(2, measure, 2, 1)
    assert len(found) == 2
    for rank in found:
        assert rank["turns"] == ["first 0", "second 0", "second 1", "first 1", "first 2", "second 2"]
        assert rank["threads"] == 1
        assert rank["taken"]["ours"]["loss"] == [3.0, 3.0]
        assert [len(rank["taken"]["theirs"][kind]) for kind in ("cpu", "wall", "loss")] == [2, 2, 2]
    figures = pairs.summarise([rank["taken"] for rank in found])
    assert figures["ours_cpu_seconds"] > figures["theirs_cpu_seconds"] > 0
