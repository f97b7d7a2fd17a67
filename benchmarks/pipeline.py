"""Pipelines beside PyTorch's own (torch.distributed.pipelining, FSDP2 on top): CPU and wall seconds of a training step.

    python benchmarks/pipeline.py                            every pair, 5 rounds
    python benchmarks/pipeline.py --pairs 1f1b               one of them
    python benchmarks/pipeline.py --timeline                 bubbles: measured, simulated with measured times, and of
                                                             the papers' formulas, on stages of equal time and others
    python benchmarks/pipeline.py --json FILE                the figures as JSON too

The step is that of `workload.py`, the clock and the figures those of `pairs.py`. A step has 8 micro-batches of one
sequence (4 on each of two replicas). The peer is the same decoder cut into the same stages, its loss divided by the
tokens of the batch, so that it need not scale gradients.

    1f1b     2 ranks                 Schedule1F1B
    zb-v     2 ranks                 ScheduleZBVZeroBubble
    dp2pp2   4 ranks, dp 2 x pp 2    Schedule1F1B over FSDP2 that keeps parameters gathered; ours at ZeRO-1, which like
                                     it gathers and reduces once a step

Formulas of bubbles are those of stages that take the same time. In `workload.py`'s model the head with its loss takes
the time of 1.3 blocks, so its 8 blocks make no such stages. Those of `EVEN` do.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from pairs import Report, Seconds, Step, catalogue, launch, losses_told, parser, summarise, take_turns
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from workload import ARCH, LENGTH, RATE, SEQUENCES, adamw, batch
from workload import plan_of as plan_on

from meshwright.arch.arch import Arch
from meshwright.comm.mesh import Mesh
from meshwright.config.choices import Schedule
from meshwright.data.batch import Batch
from meshwright.layout.axes import Degrees
from meshwright.layout.rows import whole_rows
from meshwright.model import build_decoder, initialise, rows_to_torch
from meshwright.parallel.engine import Engine
from meshwright.parallel.recorder import recorded
from meshwright.plan import plan as plans
from meshwright.plan.action import COMPUTE
from meshwright.plan.folds.simulate import Span
from meshwright.plan.folds.timeline import measured_durations, measured_timeline, planned_timeline
from meshwright.plan.program import Program, program
from meshwright.plan.resolve import unit_flops
from meshwright.plan.stages import balanced, owner_of, place, virtual_stages
from meshwright.report.schedule import draw_svg

CHUNKS = {Schedule.INTERLEAVED: 2, Schedule.ZB_V: 2}

EVEN = replace(ARCH, layers=7, vocab=6144)
"""Head and loss take the time of a block: two stages of 4 and 3 blocks, or four of 2, 2, 2 and 1, take the same."""
SHAPES = {"even": EVEN, "uneven": ARCH}


def plan_of(schedule: Schedule, dp: int = 1, zero: int = 0, pp: int = 2, arch: Arch = ARCH) -> plans.Plan:
    chunks = CHUNKS.get(schedule, 1)
    cost = unit_flops(arch, LENGTH)
    owners = [owner_of(schedule, pp, virtual)[0] for virtual in range(pp * chunks)]
    blocks = [cost(unit) for unit in range(1, arch.layers + 1)]
    stages = balanced(blocks, cost(0), cost(arch.head_unit), pp * chunks, owners)
    pipeline = plans.Pipeline(schedule, chunks, stages)
    return plan_on(Degrees(dp=dp, pp=pp), 1, plans.Sharding(zero), pipeline, arch=arch)


def ours(schedule: Schedule, dp: int = 1, zero: int = 0) -> Callable[[], Step]:
    def build() -> Step:
        plan = plan_of(schedule, dp, zero)
        engine = Engine(plan, Mesh.of(plan).start())
        return lambda batch: engine.step(batch, RATE).loss

    return build


class Stage(nn.Module):
    """The units of one virtual stage as the peer wants them: a module of one tensor."""

    def __init__(self, plan: plans.Plan, virtual: int) -> None:
        super().__init__()
        decoder = build_decoder(ARCH, dtype=torch.float32, device="cpu")
        initialise(decoder, ARCH, 0)
        self.units = nn.ModuleList(decoder.units[unit] for unit in virtual_stages(plan)[virtual])
        # Samples are whole and of one length: every micro-batch has the same rotary tables and no mask.
        self.rows = rows_to_torch(whole_rows(0, torch.arange(1).numpy(), LENGTH, None), ARCH)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x, self.rows)
        return x


def pipelining(schedule: Schedule, dp: int = 1) -> Callable[[], Step]:
    def build() -> Step:
        plan = plan_of(schedule, dp)
        mesh = init_device_mesh("cpu", (2, dp), mesh_dim_names=("pp", "dp"))
        here, total = mesh["pp"].get_local_rank(), len(plan.pipeline.stages)
        mine = [virtual for virtual in range(total) if place(plan, virtual)[0] == here]
        modules = {virtual: Stage(plan, virtual) for virtual in mine}
        if dp > 1:
            for module in modules.values():
                for unit in module.units:
                    fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=False)
                fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        group, cpu = mesh["pp"].get_group(), torch.device("cpu")
        stages = [PipelineStage(modules[virtual], virtual, total, cpu, group=group) for virtual in mine]
        tokens = SEQUENCES // dp * LENGTH

        def mean_loss(logits_NV: Tensor, labels_BS: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits_NV, labels_BS.flatten(), reduction="sum") / tokens

        options: dict[str, Any] = {"loss_fn": mean_loss, "scale_grads": False}
        micros = SEQUENCES // dp
        if schedule is Schedule.ZB_V:
            runner: Any = ScheduleZBVZeroBubble(stages, micros, **options)
        else:
            runner = Schedule1F1B(stages[0], micros, **options)
        optimizer = adamw([p for module in modules.values() for p in module.parameters()])
        first, last = 0 in modules, total - 1 in modules

        def step(batch: Batch) -> float:
            optimizer.zero_grad()
            losses: list[Tensor] = []
            inputs = (torch.from_numpy(batch.inputs),) if first else ()
            target = {"target": torch.from_numpy(batch.labels), "losses": losses} if last else {}
            runner.step(*inputs, **target)
            optimizer.step()
            return float(sum(loss.detach() for loss in losses)) if losses else 0.0

        return step

    return build


PAIRS: dict[str, tuple[int, Callable[[], Step], Callable[[], Step]]] = {
    "1f1b": (1, pipelining(Schedule.ONE_F_ONE_B), ours(Schedule.ONE_F_ONE_B)),
    "zb-v": (1, pipelining(Schedule.ZB_V), ours(Schedule.ZB_V)),
    "dp2pp2": (2, pipelining(Schedule.ONE_F_ONE_B, 2), ours(Schedule.ONE_F_ONE_B, 2, 1)),
}
"""name -> (dp, theirs, ours), built on every rank."""


def measure_pair(rank: int, ranks: int, pair: str, rounds: int, warm_up: int) -> Seconds:
    dp, theirs, mine = PAIRS[pair]
    sides = {"theirs": theirs(), "ours": mine()}
    return take_turns(sides, lambda number: batch(number).part(rank % dp, dp), rounds, warm_up)  # stages outermost


def measure_spans(
    rank: int, ranks: int, schedule: str, shape: str, rounds: int, warm_up: int
) -> list[list[tuple[float, float]]]:
    """(start, end) of every action of every round on this rank."""
    plan = plan_of(Schedule(schedule), pp=ranks, arch=SHAPES[shape])
    engine = Engine(plan, Mesh.of(plan).start())
    out = []
    for number in range(warm_up + rounds):
        whole = batch(number, SHAPES[shape])
        dist.barrier()
        _, spans = recorded(engine, lambda whole=whole: engine.step(whole, RATE))  # type: ignore[misc]
        if number >= warm_up:
            out.append([(span.start, span.end) for span in spans])
    return out


Spans = Mapping[int, Sequence[Span]]
"""Of one step, by rank."""


def compare_timelines(schedule: Schedule, shape: str, asked: argparse.Namespace) -> dict[str, Any]:
    """The round with the median time: its bubble, and that of a simulation with its own compute times."""
    ranks = asked.ranks
    results = launch(ranks, measure_spans, schedule.value, shape, asked.rounds, asked.warm_up)
    plan = plan_of(schedule, pp=ranks, arch=SHAPES[shape])
    programs = {rank: program(plan, rank) for rank in range(ranks)}
    rounds: list[Spans] = [
        {rank: [Span(index, *edges) for index, edges in enumerate(results[rank][number])] for rank in range(ranks)}
        for number in range(asked.rounds)
    ]
    spans = sorted(rounds, key=lambda each: measured_timeline(plan, programs, each).seconds)[asked.rounds // 2]
    measured = measured_timeline(plan, programs, spans)
    planned = planned_timeline(plan, measured_durations(programs, spans))
    if asked.svg is not None:
        drawn = draw_svg({f"{schedule}, planned": planned, f"{schedule}, measured": measured})
        (asked.svg / f"{schedule}-{shape}.svg").write_text(drawn)
    units = unit_seconds(plan, programs, spans)
    ideal = sum(units.values()) * plan.accumulation / ranks
    formula = bubble_of_equal_stages(schedule, ranks, plan.accumulation, plan.pipeline.chunks)
    return {
        "layers": plan.arch.layers,
        "vocab": plan.arch.vocab,
        "stages": list(plan.pipeline.stages),
        "stage_milliseconds": [1e3 * sum(units[unit] for unit in each) for each in virtual_stages(plan)],
        "block_milliseconds": 1e3 * fmean(units[unit] for unit in range(1, plan.arch.head_unit)),
        "head_milliseconds": 1e3 * units[plan.arch.head_unit],
        "after_last_compute_milliseconds": 1e3 * (measured.seconds - measured.compute_seconds),
        "measured_seconds": measured.seconds,
        "simulated_seconds": planned.seconds,
        "measured_compute_seconds": measured.compute_seconds,
        "simulated_compute_seconds": planned.compute_seconds,
        "formula_compute_seconds": ideal / (1 - formula),
        "measured_idle_of_the_whole_step": 1 - ideal / measured.seconds,
        "measured_bubble": measured.bubble,
        "simulated_bubble": planned.bubble,
        "formula_bubble": formula,
    }


def unit_seconds(plan: plans.Plan, programs: Mapping[int, Program], spans: Spans) -> Counter[int]:
    """What all computes of a unit take in one micro-batch."""
    found: Counter[int] = Counter()
    for rank, of_rank in spans.items():
        for span in of_rank:
            action = programs[rank].actions[span.index]
            if action.op in COMPUTE:
                found[action.unit] += (span.end - span.start) / plan.accumulation  # type: ignore[assignment]
    return found


def bubble_of_equal_stages(schedule: Schedule, p: int, m: int, v: int) -> float:
    """The papers' bubbles: every virtual stage takes the same time, and so do the three parts of a split backward."""
    match schedule:
        case Schedule.NAIVE:
            return (p - 1) / p
        case Schedule.GPIPE | Schedule.ONE_F_ONE_B:
            return (p - 1) / (m + p - 1)
        case Schedule.INTERLEAVED:
            return (p - 1) / (v * m + p - 1)
        case Schedule.ZB_H1:
            return (p - 1) / (3 * m + p - 1)
        case Schedule.ZB_V:
            return (p - 1) / (6 * m + p - 1)


def main() -> None:
    arguments = parser("pipeline", __doc__)
    arguments.add_argument("--timeline", action="store_true", help="bubbles of our schedules instead of pairs")
    arguments.add_argument("--schedules", nargs="+", type=Schedule, default=list(Schedule))
    arguments.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="of --timeline")
    arguments.add_argument("--ranks", type=int, default=2, help="stages of --timeline")
    arguments.add_argument("--svg", type=Path, help="a folder for pictures of --timeline")
    asked = arguments.parse_args()
    report = Report("pipeline", asked)
    if asked.timeline:
        for shape in asked.shapes:
            for schedule in asked.schedules:
                found = compare_timelines(schedule, shape, asked)
                report.add(f"timelines_{shape}", schedule.value, found)
                told = " ".join(f"{each:.1f}" for each in found["stage_milliseconds"])
                print(
                    f"{schedule} {found['stages']}, {told} ms a micro-batch (block {found['block_milliseconds']:.2f}, "
                    f"head {found['head_milliseconds']:.2f}): {found['measured_seconds']:.3f} s, bubble "
                    f"{found['measured_bubble']:.3f} measured, {found['simulated_bubble']:.3f} simulated, "
                    f"{found['formula_bubble']:.3f} of equal stages",
                    flush=True,
                )
        return
    for pair in asked.pairs:
        ranks = catalogue("pipeline")[pair]["ranks"][0]
        results = launch(ranks, measure_pair, pair, asked.rounds, asked.warm_up)
        theirs = sum(rank["theirs"]["loss"][-1] for rank in results) / PAIRS[pair][0]  # the last stage alone has it
        losses = {"theirs": theirs, "ours": results[0]["ours"]["loss"][-1]}
        report.pair(pair, ranks, {**summarise(results), "last_loss": losses}, losses_told(losses))


if __name__ == "__main__":
    main()
