"""Runs a function on several ranks of one machine and tells everything when it fails.

    def adds(rank: int, value: float) -> float:
        x = torch.full((4,), value + rank)
        dist.all_reduce(x)
        return float(x[0])

    def test_adds() -> None:
        assert run(adds, 2, 1.0) == [3.0, 3.0]

Ranks are forked from a server with torch imported, once a test session (eight ranks: 0.2 s); they meet through a file,
so no port can be taken. The function and its arguments travel by pickle: both must be importable from a module.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from meshwright.launch.environment import adopt, local_snapshot
from meshwright.launch.forkserver import start_server
from meshwright.launch.join import join_file, leave
from meshwright.launch.rank import prepare

# After the first failure the others get this long to fail by themselves (a closed connection ends most): their own
# tracebacks say more than the place where they were killed.
_GRACE_S = 3.0
_DUMP_S = 1.0


class RanksError(AssertionError):
    """One or more ranks raised, died or did not come to an end. The message holds every rank's traceback."""


def run(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls `function(rank, *args)` on `world` ranks joined by gloo and returns their results in rank order.

    Each rank has the default process group made before and destroyed after, and one torch thread. Results travel by
    pickle.

    Args:
        timeout: seconds, for the whole launch; a hang is a failure that says where each rank stood.
        environment: variables set in the ranks, on top of this process's.

    Raises:
        RanksError: with every rank's traceback, or its stack when it hung.
    """
    return _launch(function, world, args, None, timeout, environment)


def run_cases(
    function: Callable[..., Any],
    world: int,
    cases: Sequence[Any],
    *args: Any,
    timeout: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> list[list[Any]]:
    """Calls `function(rank, case, *args)` for every case in one launch: result[rank][case].

    The first case that fails ends the launch, for its ranks may have left each other in the middle of a collective; the
    message names it: by its `name`, else by its text.
    """
    return _launch(function, world, args, tuple(cases), timeout, environment)


@dataclass(frozen=True)
class _Call:
    """What every rank is asked to do; `cases` None: one call without a case."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    cases: tuple[Any, ...] | None


def _launch(
    function: Callable[..., Any],
    world: int,
    args: tuple[Any, ...],
    cases: tuple[Any, ...] | None,
    timeout: float,
    environment: Mapping[str, str] | None,
) -> list[Any]:
    start_server(("meshwright.testing.ranks",))
    context = multiprocessing.get_context("forkserver")
    call = pickle.dumps(_Call(function, args, cases))
    variables = {**local_snapshot(), **(environment or {})}
    readers: list[Connection] = []
    processes: list[ForkServerProcess] = []
    with tempfile.TemporaryDirectory(prefix="meshwright-ranks-") as folder:
        try:
            for rank in range(world):
                reader, writer = context.Pipe(duplex=False)
                readers.append(reader)
                process = context.Process(target=_rank, args=(rank, world, folder, variables, call, writer))
                process.start()
                processes.append(process)
                writer.close()
            return _collect(readers, processes, Path(folder), timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for reader in readers:
                reader.close()


def _rank(rank: int, world: int, folder: str, variables: Mapping[str, str], call: bytes, writer: Connection) -> None:
    """The life of one rank; its last word is (True, result) or (False, traceback), pickled here so that no tensor's
    memory is shared with a process that ends."""
    prepare(num_threads=1)
    adopt(variables)
    stack = (Path(folder) / f"stack-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    try:
        asked: _Call = pickle.loads(call)
        join_file(Path(folder) / "store", rank, world)
        word = pickle.dumps((True, _answer(asked, rank, Path(folder))))
        leave()
        writer.send_bytes(word)
    except BaseException:
        writer.send_bytes(pickle.dumps((False, traceback.format_exc())))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a process group left in mid-collective may abort in its destructor


def _answer(asked: _Call, rank: int, folder: Path) -> Any:
    if asked.cases is None:
        return asked.function(rank, *asked.args)
    results = []
    for number, case in enumerate(asked.cases):
        name = f"case {number + 1} of {len(asked.cases)}: {getattr(case, 'name', case)}"
        (folder / f"case-{rank}").write_text(name)
        try:
            results.append(asked.function(rank, case, *asked.args))
        except BaseException as error:
            error.add_note(f"in {name}")
            raise
    return results


def _collect(readers: list[Connection], processes: Sequence[BaseProcess], folder: Path, timeout: float) -> list[Any]:
    """Reads every rank's last word; after the first failure the others have a short grace."""
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_ranks = dict(zip(readers, range(len(readers)), strict=True))
    while open_ranks and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(open_ranks), left):
            assert isinstance(ready, Connection)
            rank = open_ranks.pop(ready)
            try:
                done, value = pickle.loads(ready.recv_bytes())
            except EOFError:
                processes[rank].join()
                done, value = False, f"ended without a word: {_ending(processes[rank].exitcode)}"
            (results if done else failures)[rank] = value
            if not done:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    hanging = sorted(open_ranks.values())
    if not failures and not hanging:
        return [results[rank] for rank in range(len(readers))]
    stacks = _stacks(hanging, processes, folder)
    for rank in hanging:
        when = f"within {timeout:g} s" if not failures else "and was stopped"
        failures[rank] = f"did not end {when}; it stood in\n{stacks[rank]}"
    finished = f"; finished: {sorted(results)}" if results else ""
    parts = [f"--- rank {rank}{_case_of(rank, folder)}\n{failures[rank].rstrip()}" for rank in sorted(failures)]
    raise RanksError("\n".join([f"{len(failures)} of {len(readers)} ranks failed{finished}", *parts]))


def _case_of(rank: int, folder: Path) -> str:
    case = folder / f"case-{rank}"
    return f" in {case.read_text()}" if case.exists() else ""


def _ending(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"


def _stacks(ranks: list[int], processes: Sequence[BaseProcess], folder: Path) -> dict[int, str]:
    """The Python frames in which hanging ranks stand. The dump is written by a C handler, so it works inside a
    blocked collective; a stopped process writes none."""
    for rank in ranks:
        pid = processes[rank].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + _DUMP_S
    stacks = dict.fromkeys(ranks, "")
    while not all(stacks.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
        for rank in ranks:
            file = folder / f"stack-{rank}"
            stacks[rank] = file.read_text() if file.exists() else ""
    return {rank: text or "(no stack: the process is stopped or starting)" for rank, text in stacks.items()}
