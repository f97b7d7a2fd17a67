"""What offload costs beside what it saves: the same steps with optimizer state (or parameters) on the device and away.

    python benchmarks/offload.py [--rounds 5] [--folder DIR] [--json FILE]

Shape, batch and method of benchmarks/zero.py: all sides of a launch take steps in turn. "Device" is what the program's
allocator holds between steps, and at most; on a CPU host memory is the same silicon, so the saving is one of accounting
and the slowdown that of copying; beside a GPU both are real. Disk is a memory-mapped file in --folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from zero import ARCH, RATE, batches, hardware, launch, plan_of

from meshwright.comm.mesh import Mesh
from meshwright.config.choices import Offload
from meshwright.parallel.engine import Engine
from meshwright.plan.plan import Execution


def measure(rank: int, ranks: int, folder: str, rounds: int) -> dict[str, Any]:
    """Seconds of each round, and bytes, of every place."""
    mesh = Mesh(dp=ranks).start()
    sides = {
        "optimizer here, stage 1": (1, Execution()),
        "optimizer to memory, stage 1": (1, Execution(offload=Offload.OPTIMIZER)),
        "optimizer to disk, stage 1": (1, Execution(offload=Offload.OPTIMIZER, offload_to=folder)),
        "parameters here, stage 3": (3, Execution()),
        "parameters to memory, stage 3": (3, Execution(offload=Offload.PARAMS)),
        "parameters to disk, stage 3": (3, Execution(offload=Offload.PARAMS, offload_to=folder)),
    }
    engines = {
        name: Engine(replace(plan_of(ranks, zero, True), execution=execution), mesh)
        for name, (zero, execution) in sides.items()
    }
    out: dict[str, Any] = {name: {"cpu": [], "wall": []} for name in sides}
    for number in range(rounds + 1):
        for name, engine in engines.items():
            engine.allocator.reset_peak()
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            engine.step(batches(rank, ranks, number), RATE)
            if number:
                out[name]["cpu"].append(time.process_time() - cpu)
                out[name]["wall"].append(time.perf_counter() - wall)
    for name, engine in engines.items():
        out[name] |= {"between_bytes": engine.allocator.total, "peak_bytes": engine.allocator.peak}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        results = launch(asked.ranks, measure, folder, asked.rounds)
    report: dict[str, Any] = {"hardware": hardware(), "ranks": asked.ranks, "layers": ARCH.layers, "places": {}}
    base: dict[str, float] = {}
    for name in results[0]:
        row = {
            kind: statistics.median(
                statistics.mean(rank[name][kind][i] for rank in results) for i in range(asked.rounds)
            )
            for kind in ("cpu", "wall")
        }
        row |= {kind: max(rank[name][kind] for rank in results) for kind in ("between_bytes", "peak_bytes")}
        base = row if " here, " in name else base
        report["places"][name] = {**row, **{f"{kind}_ratio": row[kind] / base[kind] for kind in ("cpu", "wall")}}
        print(
            f"{name:32} CPU {row['cpu']:.3f} s ({row['cpu'] / base['cpu']:.3f}), wall {row['wall']:.3f} s "
            f"({row['wall'] / base['wall']:.3f}); device {row['between_bytes'] / 2**20:.0f} MiB between steps, "
            f"{row['peak_bytes'] / 2**20:.0f} MiB at most"
        )
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
