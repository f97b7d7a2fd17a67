"""What every benchmark of pairs has in common: ranks, the clock, the figures, the report.

All sides of a comparison live in one launch and take steps in turn, so that whatever else the machine does hits all:

    round 0   theirs ours        round 1   ours theirs        ...        ratio of a round: ours / theirs

A figure is the median over rounds of the mean over ranks of `time.process_time`, which counts all threads and the
kernel; a ratio is the median of the rounds' ratios, beside the lowest and the highest.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from meshwright.data.batch import Batch
from meshwright.launch.environment import JoinError, Place, detect
from meshwright.launch.join import join, leave
from meshwright.launch.rank import prepare
from meshwright.price.here import processor_name

Step = Callable[[Batch], float]
"""One training step on a rank's batch; returns the loss."""
Seconds = dict[str, dict[str, list[float]]]
"""Of one rank: side -> cpu, wall (and loss) -> a value a round."""

CATALOGUE = Path(__file__).with_name("catalogue.toml")


def catalogue(benchmark: str) -> dict[str, dict[str, Any]]:
    """The pairs of one benchmark: name -> peer, ranks, bars."""
    pairs: dict[str, dict[str, Any]] = tomllib.loads(CATALOGUE.read_text())[benchmark]["pairs"]
    return pairs


def usual(benchmark: str) -> list[str]:
    """The pairs that run where none is named."""
    return [name for name, pair in catalogue(benchmark).items() if not pair.get("named_only")]


def take_turns(
    sides: Mapping[str, Step], batch: Callable[[int], Batch], rounds: int, warm_up: int, group: Any = None
) -> Seconds:
    """CPU and wall seconds, and the loss, of every side's step in every round after the warm-up, on this rank."""
    taken: Seconds = {name: {"cpu": [], "wall": [], "loss": []} for name in sides}
    for number in range(warm_up + rounds):
        of_round = batch(number)
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            gc.collect()
            dist.barrier(group)
            wall, cpu = time.perf_counter(), time.process_time()
            loss = sides[name](of_round)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            dist.barrier(group)
            if number >= warm_up:
                for key, value in (("cpu", cpu), ("wall", wall), ("loss", loss)):
                    taken[name][key].append(value)
    return taken


def on_rank(
    rank: int, ranks: int, store: str, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    prepare(num_threads=1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    result = function(rank, ranks, *args)
    Path(folder, str(rank)).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def launch(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, ranks, *args)` on ranks of one thread; its result (JSON) on every rank.

    The ranks are started here; a launcher's rank takes its place among those that are there, and every one of them
    comes here, with rank 0's arguments, and returns with all results.
    """
    place = detect()
    if place is not None:
        return at_place(place, ranks, function, args)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        torch.multiprocessing.spawn(on_rank, (ranks, store, folder, function, args), nprocs=ranks)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]


def at_place(place: Place, ranks: int, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    if ranks != place.world:
        raise SystemExit(f"error: needs {ranks} ranks, and the launcher started {place.world}")
    prepare(num_threads=1)
    try:
        join(place)
    except JoinError as error:
        raise SystemExit(f"error: {error}") from None
    told = [args]
    dist.broadcast_object_list(told)
    results: list[Any] = [None] * ranks
    dist.all_gather_object(results, json.loads(json.dumps(function(place.rank, ranks, *told[0]))))
    dist.barrier()
    leave()
    return results


def summarise(results: Sequence[Seconds], ours: str = "ours", theirs: str = "theirs") -> dict[str, float]:
    """Medians over rounds of means over ranks; ratios are taken round by round."""
    rounds = range(len(results[0][ours]["cpu"]))
    figures = {}
    for kind in ("cpu", "wall"):
        mean = {
            told: [statistics.mean(rank[side][kind][i] for rank in results) for i in rounds]
            for told, side in (("ours", ours), ("theirs", theirs))
        }
        for told, values in mean.items():
            figures[f"{told}_{kind}_seconds"] = statistics.median(values)
        ratios = [own / other for own, other in zip(mean["ours"], mean["theirs"], strict=True)]
        figures[f"{kind}_ratio"] = statistics.median(ratios)
        figures[f"{kind}_ratio_low"], figures[f"{kind}_ratio_high"] = min(ratios), max(ratios)
    return figures


def hardware() -> dict[str, Any]:
    return {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "priority": priority(),
    }


def priority() -> str:
    """Real-time processes do not share their cores with ordinary ones; elsewhere than on Linux all are ordinary."""
    real = {getattr(os, name) for name in ("SCHED_FIFO", "SCHED_RR") if hasattr(os, name)}
    return "real-time" if real and os.sched_getscheduler(0) in real else "ordinary"


def parser(benchmark: str, about: str, warm_up: int = 2) -> argparse.ArgumentParser:
    """The arguments all have in common."""
    out = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = usual(benchmark)
    out.add_argument("--rounds", type=int, default=5)
    out.add_argument("--warm-up", type=int, default=warm_up)
    out.add_argument("--pairs", nargs="+", choices=list(catalogue(benchmark)), default=names, metavar="PAIR",
                     help=f"without: {' '.join(names)}; also {' '.join(sorted({*catalogue(benchmark)} - {*names}))}"
                     if len(names) < len(catalogue(benchmark)) else f"of {' '.join(names)}")  # fmt: skip
    out.add_argument("--json", type=Path, metavar="FILE", help="the figures as JSON too")
    return out


class Report:
    """The figures of one run of a benchmark: a line a pair on standard output, and a file that is whole after each."""

    def __init__(self, benchmark: str, asked: argparse.Namespace) -> None:
        self._pairs, self._file = catalogue(benchmark), asked.json
        command = f"python benchmarks/{benchmark}.py {' '.join(sys.argv[1:])}".rstrip()
        self.content: dict[str, Any] = {"command": command, "hardware": hardware(), "rounds": asked.rounds}
        print(hardware(), flush=True)

    def pair(self, name: str, ranks: int, figures: Mapping[str, Any], more: str = "") -> None:
        """One comparison, from `summarise`, with further figures of its own; `more` ends the printed line."""
        peer, bar = self._pairs[name]["peer"], self._pairs[name].get("bars", {}).get(str(ranks))
        row = {"peer": peer, "ranks": ranks, **figures, "bar": bar}
        print(
            f"{name}: CPU {row['ours_cpu_seconds']:.3f} s, {peer} {row['theirs_cpu_seconds']:.3f} s, "
            f"ratio {row['cpu_ratio']:.3f} ({row['cpu_ratio_low']:.3f} .. {row['cpu_ratio_high']:.3f}"
            f"{'' if bar is None else f', bar {bar:.2f}'}), wall ratio {row['wall_ratio']:.3f}{more}",
            flush=True,
        )
        self.add("pairs", name, row)

    def add(self, section: str, name: str, value: Any) -> None:
        self.content.setdefault(section, {})[name] = value
        if self._file:
            self._file.write_text(json.dumps(self.content, indent=1) + "\n")


def losses_told(losses: Mapping[str, float]) -> str:
    """Both sides have learned the same."""
    return f", last loss {losses['ours']:.6f} / {losses['theirs']:.6f}"
