"""What offload costs beside what it saves: the same steps with optimizer state (or parameters) on the device and away.

    python benchmarks/offload.py [--rounds 5] [--folder DIR] [--json FILE]

The step is that of `workload.py`, the clock and the figures those of `pairs.py`: all sides of a launch take steps in
turn. "Device" is what the program's allocator holds between steps, and at most; on a CPU host memory is the same
silicon, so the saving is one of accounting and the slowdown that of copying; beside a GPU both are real. Disk is a
memory-mapped file in --folder.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from pairs import Report, Step, launch, parser, summarise, take_turns
from workload import RATE, SEQUENCES, batch, plan_of

from meshwright.comm.mesh import Mesh
from meshwright.config.choices import Offload
from meshwright.data.batch import Batch
from meshwright.layout.axes import Degrees
from meshwright.parallel.engine import Engine
from meshwright.plan.plan import Execution, Sharding

KINDS = {"optimizer": (1, Offload.OPTIMIZER), "parameters": (3, Offload.PARAMS)}
"""What is offloaded -> (stage, the plan's word)."""
KEPT = {f"{kind}-memory": f"{kind}-kept" for kind in KINDS} | {f"{kind}-disk": f"{kind}-kept" for kind in KINDS}
"""pair -> the side it is compared with."""


def execution(kind: str, place: str, folder: str) -> Execution:
    if place == "kept":
        return Execution()
    if place == "memory":
        return Execution(offload=KINDS[kind][1])
    return Execution(offload=KINDS[kind][1], offload_to=folder)


def measure(rank: int, ranks: int, sides: list[str], folder: str, rounds: int, warm_up: int) -> dict[str, Any]:
    """Seconds of each round, and bytes, of every side."""
    mesh = Mesh(dp=ranks).start()
    engines = {}
    for side in sides:
        kind, _, place = side.partition("-")
        sharding, away = Sharding(KINDS[kind][0]), execution(kind, place, folder)
        engines[side] = Engine(plan_of(Degrees(dp=ranks), SEQUENCES // ranks, sharding, execution=away), mesh)
    steps = {side: step_of(engine) for side, engine in engines.items()}
    taken: dict[str, Any] = take_turns(steps, lambda number: batch(number).part(rank, ranks), rounds, warm_up)
    for side, engine in engines.items():
        taken[side] |= {"between_bytes": engine.allocator.total, "peak_bytes": engine.allocator.peak}
    return taken


def step_of(engine: Engine) -> Step:
    def step(batch: Batch) -> float:
        engine.allocator.reset_peak()
        return engine.step(batch, RATE).loss

    return step


def main() -> None:
    arguments = parser("offload", __doc__, warm_up=1)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--folder", type=Path, help="where files of the disk go")
    asked = arguments.parse_args()
    report = Report("offload", asked)
    sides = list(dict.fromkeys(side for pair in asked.pairs for side in (KEPT[pair], pair)))
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        results = launch(asked.ranks, measure, sides, folder, asked.rounds, asked.warm_up)
    bytes_of = {
        side: {kind: max(rank[side][kind] for rank in results) for kind in ("between_bytes", "peak_bytes")}
        for side in sides
    }
    for pair in asked.pairs:
        here, away = ({kind: n / 2**20 for kind, n in bytes_of[side].items()} for side in (KEPT[pair], pair))
        more = (
            f"; device {away['between_bytes']:.0f} MiB between steps ({here['between_bytes']:.0f} kept), "
            f"{away['peak_bytes']:.0f} MiB at most ({here['peak_bytes']:.0f})"
        )
        figures = summarise(results, ours=pair, theirs=KEPT[pair])
        figures |= {f"ours_{kind}": n for kind, n in bytes_of[pair].items()}
        figures |= {f"theirs_{kind}": n for kind, n in bytes_of[KEPT[pair]].items()}
        report.pair(pair, asked.ranks, figures, more)


if __name__ == "__main__":
    main()
