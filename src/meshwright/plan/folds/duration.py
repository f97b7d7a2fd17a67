"""How long a step lasts, without its graph: ranks take turns, each runs until it waits for what others have not begun.

    rank 0   compute | issue sum | compute | wait ...                       rank 1 has not issued the sum
    rank 1                                            compute | issue sum ...
                                                                        |   it begins at the later of both, and behind
    rank 0                                        ... | update              what its communicator did before

The longest path through the graph of `simulate.py`, to the bit, where every communicator is a stream of its own: for
plans whose spans nobody asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from meshwright.plan.action import COMPUTE, Action, Op
from meshwright.plan.folds.graph import Stream, StreamsOfRank, representatives
from meshwright.plan.folds.simulate import Durations
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program

__all__ = ["step_seconds"]

_LOCAL = COMPUTE | {Op.UPDATE}


def step_seconds(plan: Plan, durations: Durations, programs: Mapping[int, Program] | None = None) -> float:
    """Seconds of a step of `programs` (rank -> program), or of training over one rank of every role.

    Raises ValueError where it hangs.
    """
    programs = representatives(plan) if programs is None else programs
    lines = _Lines(frozenset(programs))
    runs = [_Run(plan, rank, program, durations, lines) for rank, program in programs.items()]
    turns = [run.turns() for run in runs]
    while turns:
        before = sum(run.done for run in runs)
        turns = [turn for turn in turns if next(turn, False)]
        if turns and sum(run.done for run in runs) == before:
            raise ValueError("a step that hangs has no duration")
    return max([run.now for run in runs] + [line.ends[-1] for line in lines.of.values() if line.ends])


@dataclass
class _Line:
    """What is launched on one stream, in order; `ends` are those of what all `members` have issued."""

    members: tuple[int, ...]
    missing: list[int] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    lasts: list[float] = field(default_factory=list)

    def issue(self, number: int, now: float, seconds: float | None) -> None:
        """One more member launches `number`; `seconds` of the transfer are told by the first of them."""
        if number == len(self.missing):
            self.missing.append(len(self.members))
            self.begins.append(now)
            self.lasts.append(0.0)
        self.missing[number] -= 1
        self.begins[number] = max(self.begins[number], now)
        if seconds is not None:
            self.lasts[number] = seconds
        if not self.missing[number]:  # all before it are over: members launch in order
            before = self.ends[-1] if self.ends else 0.0
            self.ends.append(max(self.begins[number], before) + self.lasts[number])


class _Lines:
    """The line of every stream, one object for all its members."""

    def __init__(self, ranks: frozenset[int]) -> None:
        self._ranks = ranks
        self.of: dict[Stream, _Line] = {}

    def on(self, stream: Stream) -> _Line:
        if stream not in self.of:
            self.of[stream] = _Line(tuple(rank for rank in stream.ranks if rank in self._ranks))
        return self.of[stream]


class _Run:
    """One rank at work; `now` is its clock, `done` how many actions it is through."""

    def __init__(self, plan: Plan, rank: int, program: Program, durations: Durations, lines: _Lines) -> None:
        self._rank, self._program, self._durations, self._lines = rank, program, durations, lines
        self._streams = StreamsOfRank(plan, rank)
        self._found: dict[tuple[object, ...], _Line] = {}
        self._launched: dict[int, tuple[_Line, int]] = {}
        self._issued: dict[int, int] = {}  # by line
        self.now, self.done = 0.0, 0

    def turns(self) -> Iterator[bool]:
        """Work; gives True whenever it has to wait for others."""
        for index, action in enumerate(self._program.actions):
            if action.op in _LOCAL:
                self.now += self._durations(self._program, action)
            elif action.op is Op.WAIT:
                if action.of in self._launched:
                    line, number = self._launched.pop(action.of)
                    while len(line.ends) <= number:
                        yield True
                    self.now = max(self.now, line.ends[number])
            elif action.launches:
                self._launch(index, action)
            self.done += 1

    def _launch(self, index: int, action: Action) -> None:
        key = action.group, action.peer, action.op is Op.SEND
        if key not in self._found:
            self._found[key] = self._lines.on(self._streams.of(action))
        line = self._found[key]
        number = self._issued.get(id(line), 0)
        self._issued[id(line)] = number + 1
        is_first = line.members[0] == self._rank
        line.issue(number, self.now, self._durations(self._program, action) if is_first else None)
        self._launched[index] = line, number
