"""One trial, inside a copy of the package: what notices that something is wrong.

fork server -> this process -> ranks, forked before anything is computed (autograd's threads do not survive a fork)
                    |             | wait
                    program, dry run, reference
                    |-----------> | climb the last rung, report
                    verdict
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import meshwright
from meshwright.arch.resolve import arch_from_model
from meshwright.config.load import build_run
from meshwright.launch.meeting import Meeting
from meshwright.parallel.dry_run import dry_run
from meshwright.plan.folds.deadlock import problems
from meshwright.plan.folds.graph import build_graph
from meshwright.plan.folds.hazards import hazards
from meshwright.plan.plan import Plan
from meshwright.plan.program import program
from meshwright.plan.resolve import resolve
from meshwright.testing.models import m0_bytes
from meshwright.verify.ladder import Rung, ladder
from meshwright.verify.verify import climb_all, judge, make_references

__all__ = ["Trial", "attempt"]

_TIMEOUT_S = 20.0  # of a collective: a rank that left its neighbours in the middle of one is caught by then
_PEAK = 0.05


@dataclass(frozen=True, slots=True)
class Trial:
    """What noticed. Texts are empty and `first` is None where nothing did.

    `peak_ratio` is the predicted peak over the dry run's; 0 where none was made.
    """

    program: str = ""
    ledger: str = ""
    memory: str = ""
    first: str | None = None
    cause: str | None = None
    told: str = ""
    error: str = ""
    peak_ratio: float = 0.0

    @property
    def caught(self) -> bool:
        return bool(self.program or self.ledger or self.memory or self.first is not None or self.error)


def attempt(where: str, request: Mapping[str, Any]) -> None:
    """Print what notices, one JSON object a stage, each with all that is known by then.

    `request` has the tables of the run, and `wanted`: what must notice. Where something is wanted, what comes after the
    last of it is left out; where anything will do, what comes after the first notice.
    """
    if not Path(meshwright.__file__).is_relative_to(where):
        raise RuntimeError(f"the trial imported {meshwright.__file__}, not the copy")
    run = build_run(m0_bytes(**{section: dict(keys) for section, keys in request["run"].items()}))
    rung = ladder(resolve(run, arch_from_model(run.model)))[-1]
    wanted = set(request["wanted"])
    ranks = _Ranks(rung) if wanted - {"program"} or not wanted else None
    try:
        found, hangs = _program(rung.plan)
        trial = Trial(program=found)
        _tell(trial)
        if hangs or (wanted and wanted <= {"program"}) or ranks is None:
            return
        ledger, memory, ratio = _dry(rung.plan)
        trial = Trial(found, ledger, memory, peak_ratio=ratio)
        _tell(trial)
        if (wanted == {"any"} and trial.caught) or (wanted and wanted <= {"program", "ledger", "memory"}):
            return
        first, cause, told = ranks.climb()
        _tell(Trial(found, ledger, memory, first, cause, told, peak_ratio=ratio))
    finally:
        if ranks is not None:
            ranks.end()


def _tell(trial: Trial) -> None:
    print("\n" + json.dumps(asdict(trial)), flush=True)


def _program(plan: Plan) -> tuple[str, bool]:
    """What is wrong with the programs, and whether they would hang."""
    programs = {rank: program(plan, rank) for rank in range(plan.degrees.ranks)}
    stuck = problems(plan, build_graph(plan, programs))
    found = [str(each) for one in programs.values() for each in hazards(plan, one)]
    return "; ".join([*stuck[:1], *found[:1]]), bool(stuck)


def _dry(plan: Plan) -> tuple[str, str, float]:
    dry = dry_run(plan, plan.degrees.ranks - 1)
    ledger = "" if dry.traffic_equal else f"rows {sorted(map(str, set(dry.measured) ^ set(dry.predicted)))[:2]} differ"
    near = abs(dry.peak_ratio - 1) <= _PEAK and dry.states_equal
    memory = "" if near else f"peak: {dry.peak_ratio:.3f} of the measured one was predicted"
    return ledger, memory, dry.peak_ratio


class _Ranks:
    """The ranks of a rung, forked at once; they wait until there is a reference."""

    def __init__(self, rung: Rung) -> None:
        self._rung = rung
        self._folder = tempfile.mkdtemp(prefix="meshwright-fault-")
        self._pids: list[int] = []
        self._ends: list[Connection] = []
        for rank in range(rung.plan.degrees.ranks):
            here, there = Pipe()
            pid = os.fork()
            if not pid:
                self._live(rank, there)
            there.close()
            self._pids.append(pid)
            self._ends.append(here)

    def climb(self) -> tuple[str | None, str | None, str]:
        """The verdict: what differs first, why, and in words. Raises RuntimeError with the first rank's traceback."""
        references = make_references(self._rung.plan, Path(self._folder) / "reference")
        for end in self._ends:
            end.send(references)
        reports: dict[int, Any] = {}
        while len(reports) < len(self._ends):
            waiting = [rank for rank in range(len(self._ends)) if rank not in reports]
            ready = wait([self._ends[rank] for rank in waiting])
            for rank in [rank for rank in waiting if self._ends[rank] in ready]:
                done, value = pickle.loads(self._ends[rank].recv_bytes())
                if not done:
                    raise RuntimeError(value)
                reports[rank] = value
        ordered: Sequence[Any] = [reports[rank] for rank in sorted(reports)]
        first = judge(self._rung, references, ordered).first
        return (first.name, first.likely.cause.value, str(first)) if first is not None else (None, None, "")

    def end(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _live(self, rank: int, end: Connection) -> None:
        """A rank's life; it is ended from outside."""
        try:
            references = end.recv()
            meeting = Meeting.through(
                Path(self._folder) / "meeting", rank, self._rung.plan.degrees.ranks, timeout_s=_TIMEOUT_S
            )
            word: tuple[bool, Any] = (True, climb_all(meeting, [self._rung], [references])[0])
        except BaseException:
            word = (False, traceback.format_exc())
        end.send_bytes(pickle.dumps(word))
        signal.pause()
