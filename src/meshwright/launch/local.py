"""Starts the ranks of a run on this machine, through torch's elastic launcher.

Any rank's failure ends all of them within seconds; what is raised then names the first failure in time that no other
failure caused. Signals reach every rank, and no rank outlives this process.
"""

import contextlib
import logging
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Any

from meshwright.launch.environment import Place, PlaceError, local_snapshot, num_threads
from meshwright.launch.forkserver import start_server
from meshwright.launch.report import Failure, first_failure, from_exception
from meshwright.launch.status import RankStatus

# Time for ranks to save after SIGTERM before they are killed.
STOP_S = 120.0
_MONITOR_S = 0.05
# How long a rank that says nothing waits to be ended by its launcher, which ends all as soon as one has left: the one
# that tells what was wrong shall have told it.
_SILENT_S = 5.0
_FAILED, _REFUSED, _SIGNAL = 1, 2, 128


class LaunchError(RuntimeError):
    """A rank failed, and all have ended. `failure` is the first one; the message is its closing line.

    `exit_code` is 1, or 2 where the rank refused the request.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.line())
        self.failure = failure
        self.exit_code = _REFUSED if failure.refused else _FAILED


class InterruptedRanksError(RuntimeError):
    """SIGINT or SIGTERM ended the ranks as asked; `exit_code` is 130 or 143.

    `results` are in rank order, of ranks that returned all the same; `step` is the one that all had come to.
    """

    def __init__(self, signum: int, results: Sequence[Any] = (), step: int | None = None) -> None:
        super().__init__(f"stopped by {Signals(signum).name}")
        self.exit_code = _SIGNAL + signum
        self.signal, self.results, self.step = Signals(signum), tuple(results), step


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    mistakes: tuple[type[BaseException], ...] = (),
    refusals: tuple[type[BaseException], ...] = (),
    preload: tuple[str, ...] = (),
    stop_s: float = STOP_S,
) -> list[Any]:
    """Calls `function(place, status, *args)` on `world` ranks of this machine; results in rank order.

    The function joins and leaves the process group itself (`launch.join`), installs its own SIGTERM handler when it has
    something to save, and says where it is with `status.at(step, phase)`. It, its arguments and its results travel by
    pickle. Ranks have the user's OMP_NUM_THREADS, else one thread each when there are several.

    Args:
        mistakes: exception types told without a traceback, for they are the user's.
        refusals: exception types that mean that the request was wrong.
        preload: modules the ranks import, imported once in the fork server (if this call starts it).
        stop_s: seconds for ranks to end by themselves after SIGTERM.

    Raises:
        LaunchError: a rank failed; all ended within about 5 s of it.
        InterruptedRanksError: SIGINT or SIGTERM arrived and all ranks ended.
        PlaceError: OMP_NUM_THREADS is no number.
    """
    num_threads(world)  # refuses a bad value here, once, and not in every rank
    start_server(preload)  # before torch is imported here, so that both imports run side by side
    from meshwright.launch.entry import Call, enter
    from meshwright.launch.watch import Watch

    call = pickle.dumps(Call(function, args, mistakes, refusals))
    with tempfile.TemporaryDirectory(prefix="meshwright-launch-") as folder:
        watch = Watch(Path(folder), world, stop_s)
        watch.start()
        try:
            with watch.handling_signals(), _quiet_agent():
                results, exit_codes = _run_agent(enter, world, Path(folder), (folder, local_snapshot(), call))
        except (EOFError, ConnectionError):
            if not watch.signals:
                raise
            results, exit_codes = {}, {}  # a signal to the whole group ended the fork server before it had forked all
        finally:
            watch.stop()
        _raise_failure(watch.failures(), exit_codes, watch.signals, watch.killed)
        returned = [pickle.loads(results[rank]) for rank in range(world)] if results or not watch.signals else []
        if watch.signals:
            raise InterruptedRanksError(watch.signals[0], returned, watch.last_step)
    return returned


def run_here(
    function: Callable[..., Any],
    place: Place,
    *args: Any,
    mistakes: tuple[type[BaseException], ...] = (),
    refusals: tuple[type[BaseException], ...] = (),
) -> Any:
    """Calls `function(place, status, *args)` in this process, a rank that a launcher started.

    Raises:
        LaunchError: the function raised; told as `run_ranks` tells it.
    """
    from meshwright.launch.rank import keep_freed_memory

    keep_freed_memory()
    status = RankStatus()
    try:
        return function(place, status, *args)
    except Exception as error:
        failure = from_exception(error, place.rank, time.monotonic(), status, mistakes, refusals)
        raise LaunchError(failure) from None


def exit_code(call: Callable[[], object]) -> int:
    """Makes a launch a command: 0, or after printing what ended it (the closing line last, on stderr) 1, 2, 130, 143.

    A rank that stops because another one refused the request is silent: that one tells it.
    """
    try:
        call()
    except LaunchError as error:
        sys.stdout.flush()
        if error.failure.refused and error.failure.is_consequence:
            return leave_silently()
        sys.stderr.write(error.failure.traceback)
        print(error.failure.line(), file=sys.stderr, flush=True)
        return error.exit_code
    except PlaceError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return _REFUSED
    except InterruptedRanksError as error:
        sys.stdout.flush()
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def leave_silently() -> int:
    """The exit code of a rank that refuses what another one tells; returns after that one had time to."""
    time.sleep(_SILENT_S)
    return _REFUSED


def _run_agent(
    entry: Callable[..., bytes], world: int, folder: Path, args: tuple[Any, ...]
) -> tuple[dict[int, bytes], dict[int, int]]:
    """Runs the elastic agent to its end: (result by rank, exit code by failed rank)."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a port the system chooses: two runs at once cannot collide
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=_MONITOR_S,
        start_method="forkserver",
        signals_to_handle="SIGQUIT",  # SIGINT and SIGTERM are the watch's
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "agent")),
    )
    try:
        return elastic_launch(config, entry)(*args), {}
    except ChildFailedError as error:
        return {}, {rank: failure.exitcode for rank, failure in error.failures.items()}


def _raise_failure(failures: list[Failure], exit_codes: dict[int, int], signals: list[int], killed: set[int]) -> None:
    """Decides what is told of a launch that has ended; returns when all went well, or a signal ended it as asked."""
    known = {failure.rank for failure in failures}
    # A rank that ended before it could write its files is known to the agent alone.
    early = [Failure(rank, 0.0, exit_code=code) for rank, code in exit_codes.items() if rank not in known]
    if signals and not any(failure.kind and not failure.is_consequence for failure in failures):
        if signals[0] == SIGTERM and killed and len(signals) == 1:
            rank = min(killed)
            raise LaunchError(Failure(rank, 0.0, "TimeoutError", "did not end after SIGTERM and was killed"))
        return
    first = first_failure(failures) or first_failure(early)
    if first is not None:
        raise LaunchError(replace(first, exit_code=exit_codes.get(first.rank)))


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keeps the agent's log off the screen: it repeats every failure with a banner, and ours shall be the last word."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn")]
    silent = logging.NullHandler()
    before = [logger.propagate for logger in loggers]
    try:
        for logger in loggers:
            logger.addHandler(silent)
            logger.propagate = False
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(silent)
            logger.propagate = propagate
