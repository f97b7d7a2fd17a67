"""Faults put into the source on purpose, to see whether anything notices.

    a fault      one piece of text in one file, and what stands there instead        must match exactly once
    a copy       the package in a temporary folder, with that change                 the tree itself is never touched
    a trial      a process that imports the copy and tries to prove a run            `testing.trial`

A trial looks where a user would look, cheapest first, and reports everything that speaks up:

    program      hazards and the wait-for graph of every rank                        plan/folds
    dry run      the ledger, the states, the peak against their predictions          parallel/dry_run.py
    ladder       the last rung, the whole run, against one float64 process           verify

    fault = Fault("averaged", "parallel/executor.py", old, new, run={"mesh": {"dp": 2}}, first="head.weight")
    with Trials() as trials:
        assert trials.of(fault).caught

Torch is imported once for all trials, in a server that forks a process for each.
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
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from select import select
from typing import Any

import meshwright
from meshwright.launch.environment import snapshot
from meshwright.testing.trial import Trial

__all__ = ["Fault", "FaultError", "Tables", "Trial", "Trials", "patched"]

Tables = Mapping[str, Mapping[str, Any]]
"""A run file's sections, over the tiny settings of `testing.models`."""

_PACKAGE = Path(meshwright.__file__).parent
_SERVER = Path(__file__).with_name("fault_server.py")


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

    @property
    def wanted(self) -> list[str]:
        """What must notice; any notice will do where nothing is said."""
        asked = {"program": self.program, "ledger": self.ledger, "memory": self.memory, "ladder": self.first}
        return [name for name, wanted in asked.items() if wanted] or ["any"]


def patched(fault: Fault) -> str:
    """The text of the fault's file with the fault in it. Raises FaultError."""
    text = (_PACKAGE / fault.file).read_text()
    if (found := text.count(fault.old)) != 1:
        raise FaultError(f"fault {fault.name!r}: its text is in {fault.file} {found} times, wanted once")
    return text.replace(fault.old, fault.new)


class Trials:
    """A copy of the package and a server, for as many trials as wanted, one after the other."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Trials:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="meshwright-fault-")))
        self._path, self._out, self._err = folder, folder / "out", folder / "err"
        # Compiled files come along: they hold for every file whose time is that of the original.
        shutil.copytree(_PACKAGE, folder / _PACKAGE.name)
        environment = {**snapshot(), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, str(_SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder, bufsize=0,
            env=environment,
        )  # fmt: skip
        self._stack.callback(self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def of(self, fault: Fault | None, run: Tables | None = None, timeout: float = 120.0) -> Trial:
        """Try to prove the fault's run (or `run`) with the fault in place; None: with the source as it is.

        Raises FaultError where the trial itself cannot be made; a trial that hangs is caught, and says so.
        """
        tables = run if run is not None else fault.run if fault is not None else {}
        wanted = [] if fault is None else fault.wanted
        if fault is None:
            return self._try(tables, wanted, timeout)
        file = self._path / _PACKAGE.name / fault.file
        file.write_text(patched(fault))
        try:
            return self._try(tables, wanted, timeout)
        finally:
            shutil.copy2(_PACKAGE / fault.file, file)

    def _try(self, tables: Tables, wanted: list[str], timeout: float) -> Trial:
        order = {"path": str(self._path), "out": str(self._out), "err": str(self._err)}
        self._say({**order, "request": {"run": tables, "wanted": wanted}})
        pid, error = self._hear()["pid"], ""
        if not select([self._answers], [], [], timeout)[0]:
            error = f"did not end within {timeout:g} s"
            os.killpg(pid, signal.SIGKILL)
        code = self._hear()["code"]
        told = [Trial(**json.loads(line)) for line in self._out.read_text().splitlines() if line.startswith("{")]
        if code:
            error = error or self._err.read_text().strip()[-2000:] or f"ended with code {code}"
        return replace(told[-1] if told else Trial(), error=error)

    @property
    def _answers(self) -> Any:
        assert self._server.stdout is not None
        return self._server.stdout

    def _say(self, order: Mapping[str, Any]) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order).encode() + b"\n")

    def _hear(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise FaultError("the server of trials has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _stop(self) -> None:
        self._server.kill()
        self._server.communicate()
