"""Paired rounds on two real ranks: who steps when, what is kept, and that every rank reports."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from benchmarks import pairs

from meshwright.launch.join import leave
from meshwright.testing.ranks import run


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


def told(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return {"rank": rank, "ranks": ranks, "folder": folder, "sum": float(total)}


def on_a_launchers_rank(rank: int, port: int) -> list[list[dict[str, Any]]]:
    """Two launches in one script, as every script of several pairs has them."""
    leave()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return [pairs.launch(2, told, f"of rank {rank}") for _ in range(2)]


def test_a_launchers_ranks_take_their_places() -> None:
    """Nothing is started; every rank has all results, made with rank 0's arguments."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    expected = [{"rank": rank, "ranks": 2, "folder": "of rank 0", "sum": 3.0} for rank in range(2)]
    assert run(on_a_launchers_rank, 2, port) == [[expected, expected]] * 2
