"""Checkpoints beside torch.distributed.checkpoint: the same 1 GB, the same two ranks, the same folder.

    python benchmarks/checkpoint.py                       5 rounds
    python benchmarks/checkpoint.py --pairs load          one of them
    python benchmarks/checkpoint.py --json FILE           the figures as JSON too
    chrt -r 20 python benchmarks/checkpoint.py            where others use the machine: ahead of them, not beside them

The state: weights and both moments of AdamW of 82 million parameters in float32, sharded over two ranks (ours: ZeRO-3;
theirs: DTensors cut along dim 0). Clock and figures are those of `pairs.py`, but wall seconds are the slower rank's.

    save      until the checkpoint is on disk: both sides flush every file (fsync), ours the folders' entries too
    blocked   how long an asynchronous save keeps the step; both keep their buffers from save to save
    load      into the layout that saved it
    reshard   into another layout: tensor-parallel (ours), cut along dim 1 (theirs)

Ours verifies a digest of every block and a fingerprint of every tensor at save and load; theirs verifies nothing.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pairs import Report, Seconds, catalogue, launch, parser, summarise
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from workload import plan_of

from meshwright.arch.arch import Arch
from meshwright.checkpoint.loader import load
from meshwright.checkpoint.saver import Progress, Saver
from meshwright.checkpoint.state import shapes, total_bytes
from meshwright.comm.agree import Side
from meshwright.comm.mesh import Mesh
from meshwright.layout.axes import Degrees
from meshwright.parallel.engine import Engine
from meshwright.plan.plan import Plan, Sharding

WORLD = 2
MODEL = Arch("llama", layers=5, hidden=1024, heads=8, kv_heads=8, head_dim=128, ffn=2816, vocab=8192)


def sharded() -> Plan:
    return plan_of(Degrees(dp=WORLD), 1, Sharding(3), arch=MODEL)


class Ours:
    def __init__(self, root: Path) -> None:
        self._root, self._side = root / "ours", Side()
        saved, other = sharded(), plan_of(Degrees(tp=WORLD), 1, arch=MODEL)
        self._engine = Engine(saved, Mesh.of(saved).start())
        self._other = Engine(other, Mesh.of(other).start())
        self._step = 0

    def _saver(self, asynchronous: bool) -> Saver:
        return Saver(self._engine, self._root, keep=9, asynchronous=asynchronous, side=self._side)

    def _next(self) -> None:
        """Old checkpoints go before the clock starts, on both sides."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._root, ignore_errors=True)
        dist.barrier()
        self._step += 1

    def save(self) -> tuple[float, float]:
        self._next()
        return timed(lambda: self._saver(False).save(Progress(self._step, 0)))

    def blocked(self) -> tuple[float, float]:
        self._next()
        saver = self._saver(True)
        saver.save(Progress(self._step, 0))  # buffers are kept from save to save
        saver.wait()
        self._next()
        seconds = timed(lambda: saver.save(Progress(self._step, 0)))
        saver.wait()
        return seconds

    def load(self) -> tuple[float, float]:
        return timed(lambda: load(self._engine, self._root, self._side))

    def reshard(self) -> tuple[float, float]:
        return timed(lambda: load(self._other, self._root, self._side))


class Theirs:
    def __init__(self, root: Path) -> None:
        self._root, self._step = root / "theirs", 0
        self._root.mkdir(exist_ok=True)
        self._mesh = init_device_mesh("cpu", (WORLD,))
        self._group = dist.new_group(backend="gloo")
        self._writer = dcp.FileSystemWriter(self._folder(), sync_files=True)
        self._stager = DefaultStager(StagingOptions(False, False, False, False))  # nothing pinned, no thread or process
        names = shapes(sharded()).items()
        self._state = {name: self._cut(shape, 0) for name, (shape, _) in names}
        self._other = {name: self._cut(shape, min(len(shape) - 1, 1)) for name, (shape, _) in names}

    def _cut(self, shape: tuple[int, ...], dim: int) -> DTensor:
        whole: Tensor = (
            torch.randn(shape, generator=torch.Generator().manual_seed(0)) if dim == 0 else torch.empty(shape)
        )
        return distribute_tensor(whole, self._mesh, [Shard(dim)])

    def _folder(self) -> str:
        return str(self._root / str(self._step))

    def _next(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0 and self._step:
            shutil.rmtree(self._folder())
        dist.barrier()
        self._step += 1

    def save(self) -> tuple[float, float]:
        self._next()
        return timed(lambda: dcp.save(self._state, checkpoint_id=self._folder(), storage_writer=self._writer))

    def blocked(self) -> tuple[float, float]:
        self._next()
        futures: list[Any] = []
        seconds = timed(
            lambda: futures.append(
                dcp.async_save(
                    self._state,
                    checkpoint_id=self._folder(),
                    storage_writer=self._writer,
                    process_group=self._group,
                    async_stager=self._stager,
                )
            )
        )
        futures[0].result()
        return seconds

    def load(self) -> tuple[float, float]:
        return timed(lambda: dcp.load(self._state, checkpoint_id=self._folder()))

    def reshard(self) -> tuple[float, float]:
        return timed(lambda: dcp.load(self._other, checkpoint_id=self._folder()))


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds of the slower rank, CPU seconds of the mean rank."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    taken = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64)
    slower, total = taken.clone(), taken.clone()
    dist.all_reduce(slower, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return float(slower[0]), float(total[1]) / WORLD


def measure(rank: int, ranks: int, folder: str, pairs: list[str], rounds: int, warm_up: int) -> dict[str, Seconds]:
    """pair -> the seconds of both sides in every round, which all ranks agree on."""
    warnings.simplefilter("ignore")
    sides: dict[str, Ours | Theirs] = {"ours": Ours(Path(folder)), "theirs": Theirs(Path(folder))}
    seconds: dict[str, Seconds] = {pair: {side: {"wall": [], "cpu": []} for side in sides} for pair in pairs}
    nothing_saved = {"save", "blocked"}.isdisjoint(pairs)
    for number in range(warm_up + rounds):
        for name in list(sides) if number % 2 else reversed(list(sides)):
            if nothing_saved and not number:
                sides[name].save()
            for pair in pairs:
                wall, cpu = getattr(sides[name], pair)()
                if number >= warm_up:
                    seconds[pair][name]["wall"].append(wall)
                    seconds[pair][name]["cpu"].append(cpu)
    return seconds


def main() -> None:
    asked = parser("checkpoint", __doc__, warm_up=1).parse_args()
    asked.pairs.sort(key=list(catalogue("checkpoint")).index)  # a load reads what a save of its round wrote
    report = Report("checkpoint", asked)
    num_bytes = total_bytes(sharded())
    print(f"{num_bytes / 1e9:.2f} GB, files in the page cache", flush=True)
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        results = launch(WORLD, measure, folder, asked.pairs, asked.rounds, asked.warm_up)
    for pair in asked.pairs:
        report.pair(pair, WORLD, {**summarise([rank[pair] for rank in results]), "bytes": num_bytes})


if __name__ == "__main__":
    main()
