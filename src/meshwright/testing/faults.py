"""Faults put into the source on purpose, to see whether anything notices.

    a fault      one piece of text in one file, and what stands there instead        must match exactly once
    a copy       the package in a temporary folder, with that change                 the tree itself is never touched
    a trial      another interpreter that imports the copy and tries to prove a run

A trial looks where a user would look, cheapest first, and reports everything that speaks up:

    program      hazards and the wait-for graph of every rank                        plan/folds
    dry run      the ledger, the states, the peak against their predictions          parallel/dry_run.py
    ladder       the last rung, the whole run, against one float64 process           verify

    fault = Fault("averaged", "parallel/executor.py", old, new, run={"mesh": {"dp": 2}}, first="head.weight")
    assert try_fault(fault).caught
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import meshwright
from meshwright.launch.environment import snapshot

__all__ = ["Fault", "FaultError", "Tables", "Trial", "apply", "child", "try_fault"]

Tables = Mapping[str, Mapping[str, Any]]
"""A run file's sections, over the tiny settings of `testing.models`."""


class FaultError(ValueError):
    """The text of a fault is not in its file exactly once, or no run could be tried."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`file` is relative to the package; `run` the run in which the fault must show.

    `first`: the logical tensor, unit or number that the ladder must name, with the cause `cause`; `program`, `ledger`,
    `memory`: what must complain besides. What is left out is not asked for.
    """

    name: str
    file: str
    old: str
    new: str
    run: Tables = field(default_factory=dict)
    first: str | None = None
    cause: str | None = None
    program: str = ""
    ledger: bool = False
    memory: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """What noticed. Texts are empty and `first` is None where nothing did."""

    program: str = ""
    ledger: str = ""
    memory: str = ""
    first: str | None = None
    cause: str | None = None
    told: str = ""
    error: str = ""

    @property
    def caught(self) -> bool:
        return bool(self.program or self.ledger or self.memory or self.first is not None or self.error)


def apply(fault: Fault, folder: Path) -> Path:
    """Copy the package into `folder` with the fault in it; what to put on the path. Raises FaultError."""
    package = Path(meshwright.__file__).parent
    copy = folder / package.name
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / fault.file
    text = file.read_text()
    if (found := text.count(fault.old)) != 1:
        raise FaultError(f"fault {fault.name!r}: its text is in {fault.file} {found} times, wanted once")
    file.write_text(text.replace(fault.old, fault.new))
    return folder


def try_fault(fault: Fault | None, run: Tables | None = None, timeout: float = 180.0) -> Trial:
    """Try to prove the fault's run (or `run`) with the fault in place; None: with the source as it is.

    Raises FaultError where the trial itself cannot be made; a trial that hangs is caught, and says so.
    """
    tables = run if run is not None else fault.run if fault is not None else {}
    with tempfile.TemporaryDirectory(prefix="meshwright-fault-") as name:
        path = apply(fault, Path(name)) if fault is not None else Path(meshwright.__file__).parents[1]
        environment = {**snapshot(), "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
        code = "from meshwright.testing.faults import child; child()"
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=name, env=environment, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                out, told = process.communicate(json.dumps([str(path), tables]), timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, _ = process.communicate()
                told = f"did not end within {timeout:g} s"
    found = [Trial(**json.loads(line)) for line in out.splitlines() if line.startswith("{")]
    if len(found) == 2:
        return found[-1]
    error = told.strip()[-2000:] or f"ended with code {process.returncode}"
    return replace(found[0], error=error) if found else Trial(error=error)


def child() -> None:
    """The other end of `try_fault`: reads tables, prints what it knows before anything runs, and then the rest."""
    where, tables = json.loads(sys.stdin.read())
    if not Path(meshwright.__file__).is_relative_to(where):
        raise FaultError(f"the trial imported {meshwright.__file__}, not the copy")
    _tell(_attempt(tables))


def _tell(trial: Trial) -> None:
    print("\n" + json.dumps(asdict(trial)), flush=True)


def _attempt(tables: Tables) -> Trial:
    from meshwright.arch.resolve import arch_from_model
    from meshwright.config.load import build_run
    from meshwright.plan.resolve import resolve
    from meshwright.testing.models import m0_bytes
    from meshwright.verify.ladder import ladder

    run = build_run(m0_bytes(**{section: dict(keys) for section, keys in tables.items()}))
    rung = ladder(resolve(run, arch_from_model(run.model)))[-1]
    program, hangs = _program(rung.plan)
    _tell(Trial(program=program))
    if hangs:
        return Trial(program=program)
    ledger, memory = _dry(rung.plan)
    first, cause, told = _climb(rung)
    return Trial(program, ledger, memory, first, cause, told)


def _program(plan: Any) -> tuple[str, bool]:
    """What is wrong with the programs, and whether they would hang."""
    from meshwright.plan.folds.deadlock import problems
    from meshwright.plan.folds.graph import build_graph
    from meshwright.plan.folds.hazards import hazards
    from meshwright.plan.program import program

    programs = {rank: program(plan, rank) for rank in range(plan.degrees.ranks)}
    stuck = problems(plan, build_graph(plan, programs))
    found = [str(each) for one in programs.values() for each in hazards(plan, one)]
    return "; ".join([*stuck[:1], *found[:1]]), bool(stuck)


def _dry(plan: Any) -> tuple[str, str]:
    from meshwright.parallel.dry_run import dry_run

    dry = dry_run(plan, plan.degrees.ranks - 1)
    ledger = "" if dry.traffic_equal else f"rows {sorted(map(str, set(dry.measured) ^ set(dry.predicted)))[:2]} differ"
    near = abs(dry.peak_ratio - 1) <= 0.05 and dry.states_equal
    return ledger, "" if near else f"peak: {dry.peak_ratio:.3f} of the measured one was predicted"


def _climb(rung: Any) -> tuple[str | None, str | None, str]:
    from meshwright.launch.forkserver import start_server
    from meshwright.launch.local import run_ranks
    from meshwright.verify.verify import climb_here, judge, make_references

    start_server((__name__,))
    with tempfile.TemporaryDirectory(prefix="meshwright-fault-") as folder:
        references = make_references(rung.plan, Path(folder) / "reference")
        reports = run_ranks(climb_here, rung.plan.degrees.ranks, [rung], [references], folder)
        first = judge(rung, references, [of_rank[0] for of_rank in reports]).first
    return (first.name, first.likely.cause.value, str(first)) if first is not None else (None, None, "")
