"""The wait-for graph of a step: who waits for whom, over all groups and sends together.

    rank 0   issue -> issue -> compute -> wait -> ...        edges down a rank: program order
               |                           ^
               v                           |
             sum of bucket 3 --------------+                 one node an instance of a collective: it starts when all
               ^                           |                 its members have issued it and what came before on its
               |                           v                 stream is done
    rank 1   issue -> compute ---------> wait -> ...

Acyclic means that the step cannot hang; the longest path is its duration; the actions of a topological order that
stopped early are a hang, told in words. All ranks of one role run one program, so one rank a pipeline coordinate is
enough: a group that stays within a role is joined with itself.

Streams. A link between stages is one stream a direction: messages are matched in the order posted. Collectives of a
rank are one stream over *all* its groups under `STRICT`, since two communicators that are entered in different orders
may hang; to predict time each communicator is a stream of its own. Collectives inside a unit (tensor, context and
expert axes) stay within a role, whose ranks run the unit at the same place of one program: they join nobody else, but
under `STRICT` a unit that has any waits for what was launched before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from meshwright.layout.axes import Coordinates
from meshwright.layout.groups import GroupName
from meshwright.plan.action import COMPUTE, Action, Kind, Op
from meshwright.plan.folds.traffic import transfer
from meshwright.plan.meeting import plan_groups
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program, role_program
from meshwright.plan.strategies.calls import unit_calls


class Streams(Enum):
    """Which collectives of one rank run one after another."""

    STRICT = "strict"
    COMMUNICATOR = "communicator"


class Stream(NamedTuple):
    """Where launches are matched by count: a communicator of `ranks`, or a link from the first to the second."""

    ranks: tuple[int, ...]
    link: bool = False


@dataclass(frozen=True, slots=True)
class Instance:
    """One collective, or one message: `issued` are its (rank, index of the launch), in order of rank."""

    stream: Stream
    number: int  # on its stream, from 0
    issued: tuple[tuple[int, int], ...]
    complete: bool  # whether every member among the ranks looked at issues it


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes: the actions of `ranks` one after another (`first[rank]` on), then the instances; `after[n]` before n."""

    programs: Mapping[int, Program]
    first: Mapping[int, int]
    instances: tuple[Instance, ...]
    after: tuple[tuple[int, ...], ...]
    mismatches: tuple[str, ...]

    @property
    def num_actions(self) -> int:
        return len(self.after) - len(self.instances)


def representatives(plan: Plan, kind: Kind = Kind.TRAIN) -> dict[int, Program]:
    """One rank of every role, with its program."""
    stages = range(plan.degrees.pp)
    return {plan.degrees.rank(Coordinates(pp=stage)): role_program(plan, stage, kind) for stage in stages}


def build_graph(plan: Plan, programs: Mapping[int, Program] | None = None, streams: Streams = Streams.STRICT) -> Graph:
    """The graph over `programs` (rank -> program), or over one rank of every role of a training step."""
    return _Builder(plan, representatives(plan) if programs is None else programs, streams).build()


class _Builder:
    def __init__(self, plan: Plan, programs: Mapping[int, Program], streams: Streams) -> None:
        self._plan, self._programs, self._streams = plan, programs, streams
        self._first: dict[int, int] = {}
        total = 0
        for rank, program in programs.items():
            self._first[rank] = total
            total += len(program.actions)
        self._after: list[list[int]] = [[] for _ in range(total)]

    def build(self) -> Graph:
        for rank, program in self._programs.items():
            start = self._first[rank]
            for node in range(start + 1, start + len(program.actions)):
                self._after[node].append(node - 1)
        instances, mismatches = self._instances()
        self._join(instances)
        after = tuple(map(tuple, self._after))
        return Graph(self._programs, self._first, tuple(instances), after, tuple(mismatches))

    def _instances(self) -> tuple[list[Instance], list[str]]:
        """Launch k of every member of a stream is instance k, and all must mean the same."""
        issued: dict[Stream, dict[int, list[int]]] = {}
        for rank, program in self._programs.items():
            names = StreamsOfRank(self._plan, rank)
            for index, action in enumerate(program.actions):
                if action.launches:
                    issued.setdefault(names.of(action), {}).setdefault(rank, []).append(index)
        instances: list[Instance] = []
        mismatches: list[str] = []
        for stream, by_rank in issued.items():
            members = [rank for rank in stream.ranks if rank in self._programs]
            lists = [by_rank.get(rank, []) for rank in members]
            for number in range(max(map(len, lists))):
                met = tuple((r, each[number]) for r, each in zip(members, lists, strict=True) if number < len(each))
                instances.append(Instance(stream, number, met, len(met) == len(members)))
                if len(met) > 1:
                    mismatches += self._disagreement(met)
        return instances, mismatches

    def _disagreement(self, met: tuple[tuple[int, int], ...]) -> list[str]:
        (rank, index), *others = met
        own = self._meaning(rank, index)
        return [
            f"rank {rank} means {' '.join(map(str, own))} by action {index}, "
            f"rank {other} {' '.join(map(str, theirs))} by action {place}"
            for other, place in others
            if (theirs := self._meaning(other, place)) != own
        ]

    def _meaning(self, rank: int, index: int) -> tuple[object, ...]:
        """What a launch is, in terms that all members share."""
        program = self._programs[rank]
        action = program.actions[index]
        if action.op in (Op.SEND, Op.RECEIVE):
            assert action.what is not None
            return action.what.value, "of micro-batch", action.micro, "for unit", action.arrives_at
        moved = transfer(self._plan, program, action)
        assert moved is not None
        of = [segment.name for segment in program.buckets[action.bucket].segments] if action.bucket >= 0 else []
        what = action.what.value if action.what else action.op.value
        return moved.operation.value, "of", what, f"({', '.join(of)})", "with", moved.payload_bytes, "bytes"

    def _join(self, instances: list[Instance]) -> None:
        """Edges into and out of the instances, and from each to the next of its streams."""
        node_of = {}
        first = len(self._after)
        for instance in instances:
            node = len(self._after)
            self._after.append([self._first[rank] + index for rank, index in instance.issued])
            node_of.update(dict.fromkeys(instance.issued, node))
        for rank, program in self._programs.items():
            last: dict[object, int] = {}
            meets = _Meeting(self._plan, program.kind)
            for index, action in enumerate(program.actions):
                if action.launches:
                    node = node_of[rank, index]
                    key = self._order(instances[node - first])
                    if key in last:
                        self._after[node].append(last[key])
                    last[key] = node
                elif action.op is Op.WAIT and (rank, action.of) in node_of:
                    self._after[self._first[rank] + index].append(node_of[rank, action.of])
                elif Streams.STRICT in last and meets.others(action):
                    self._after[self._first[rank] + index].append(last[Streams.STRICT])

    def _order(self, instance: Instance) -> object:
        """What runs in order: a link always by itself."""
        alone = instance.stream.link or self._streams is Streams.COMMUNICATOR
        return instance.stream if alone else Streams.STRICT


class _Meeting:
    """Which units meet other ranks while they are computed."""

    def __init__(self, plan: Plan, kind: Kind) -> None:
        self._plan, self._kind = plan, kind
        self._known: dict[tuple[Op, int, bool], bool] = {}

    def others(self, action: Action) -> bool:
        if action.op not in COMPUTE:
            return False
        key = action.op, action.unit, action.split  # the same in every micro-batch
        if key not in self._known:
            self._known[key] = any(True for _ in unit_calls(self._plan, action, self._kind))
        return self._known[key]


class StreamsOfRank:
    """The stream of every launch of one rank."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._rank, self._degrees, self._groups = rank, plan.degrees, plan_groups(plan)
        self._streams: dict[tuple[GroupName, int, Op | None], Stream] = {}

    def of(self, action: Action) -> Stream:
        assert action.group is not None
        key = action.group, action.peer, action.op if action.peer >= 0 else None
        if key not in self._streams:
            members = self._groups[action.group].members(self._degrees, self._degrees.coordinates(self._rank))
            self._streams[key] = self._link(members[action.peer], action.op) if action.peer >= 0 else Stream(members)
        return self._streams[key]

    def _link(self, peer: int, op: Op) -> Stream:
        return Stream((self._rank, peer) if op is Op.SEND else (peer, self._rank), link=True)
