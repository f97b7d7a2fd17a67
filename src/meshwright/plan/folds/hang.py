"""What to say when a run stands still: who waits, for what, and who has not come.

rank 5 waits in action 317, sum of bucket 12, layers 20-21; rank 1 is at 309, forward of micro-batch 6, layer 20
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.plan.action import Kind, Op
from meshwright.plan.folds.graph import Stream, StreamsOfRank
from meshwright.plan.folds.words import in_words
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program, program


@dataclass(frozen=True, slots=True)
class Hang:
    """`suspects`: the ranks that wait for nobody who is late, yet do not move; `lines` tell of every rank."""

    suspects: tuple[int, ...]
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.lines)


def hang_report(plan: Plan, reached: Mapping[int, int], kind: Kind = Kind.TRAIN) -> Hang:
    """`reached`: rank -> index of the action it is in, in step order; a rank beyond its last action has finished."""
    programs = {rank: program(plan, rank, kind) for rank in reached}
    launches = {rank: _launches(plan, rank, each) for rank, each in programs.items()}
    waited = {rank: _late(programs, launches, reached, rank) for rank in reached}
    suspects = tuple(rank for rank, late in waited.items() if not late and _unfinished(programs, reached, rank))
    ordered = sorted(reached, key=lambda rank: (rank in suspects, rank))
    return Hang(suspects, tuple(_line(plan, programs[rank], rank, reached[rank], waited[rank]) for rank in ordered))


def _line(plan: Plan, steps: Program, rank: int, index: int, late: tuple[int, ...]) -> str:
    if index >= len(steps.actions):
        return f"rank {rank} has finished"
    action = steps.actions[index]
    if action.op is not Op.WAIT:
        return f"rank {rank} is at {index}, {in_words(plan, steps, action)}"
    line = f"rank {rank} waits in action {index}, {in_words(plan, steps, steps.actions[action.of])}"
    return f"{line} (rank {', '.join(map(str, late))} has not launched it)" if late else line


def _late(
    programs: Mapping[int, Program],
    launches: Mapping[int, dict[Stream, list[int]]],
    reached: Mapping[int, int],
    rank: int,
) -> tuple[int, ...]:
    """The ranks that have yet to launch what `rank` waits for."""
    if not _unfinished(programs, reached, rank):
        return ()
    action = programs[rank].actions[reached[rank]]
    if action.op is not Op.WAIT:
        return ()
    stream, number = next(
        (stream, indices.index(action.of)) for stream, indices in launches[rank].items() if action.of in indices
    )
    others = [other for other in stream.ranks if other != rank and other in reached]
    return tuple(other for other in others if reached[other] <= launches[other][stream][number])


def _unfinished(programs: Mapping[int, Program], reached: Mapping[int, int], rank: int) -> bool:
    return reached[rank] < len(programs[rank].actions)


def _launches(plan: Plan, rank: int, steps: Program) -> dict[Stream, list[int]]:
    streams = StreamsOfRank(plan, rank)
    launches: dict[Stream, list[int]] = {}
    for index, action in enumerate(steps.actions):
        if action.launches:
            launches.setdefault(streams.of(action), []).append(index)
    return launches
