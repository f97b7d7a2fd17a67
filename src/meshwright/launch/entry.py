"""What a rank started by `local` runs: its place, its status, the function, and a record of what went wrong.

folder/rank-3.pid       the process is up           folder/rank-3.error   a Failure as JSON, written whole
folder/rank-3.status    step and phase, mapped      folder/rank-3.done    the function returned
"""

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.launch.environment import Launcher, adopt, detect, num_threads
from meshwright.launch.rank import interrupt_once, prepare
from meshwright.launch.report import from_exception, to_json
from meshwright.launch.status import RankStatus

# How long a rank that failed because of another one waits to be ended by the agent: the agent then sees the cause first
# and knows its exit code.
_YIELD_S = 1.0
_INTERRUPTED = 130

# Set by the elastic agent in each rank; everything else comes from the launching process.
_AGENT_NAMES = frozenset(
    [
        "RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_ERROR_FILE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ]
)


@dataclass(frozen=True)
class Call:
    """The function of every rank, called as `function(place, status, *args)`.

    Attributes:
        mistakes: exception types that are the user's mistake: told without a traceback.
        refusals: exception types that mean that the request was wrong.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    mistakes: tuple[type[BaseException], ...] = ()
    refusals: tuple[type[BaseException], ...] = ()


def enter(folder: str, environment: dict[str, str], call: bytes) -> bytes:
    """Runs a pickled `Call` in this rank and returns its pickled result. On any exception: leaves the record, exits 1.

    The exit is immediate, for a process group left in the middle of a collective may abort in its destructor and cover
    the first error with a second.
    """
    adopt(environment, keep=_AGENT_NAMES)
    place = detect()
    assert place is not None, "started outside the elastic agent"
    place = replace(place, launcher=Launcher.LOCAL)
    file = Path(folder) / f"rank-{place.rank}"
    status = RankStatus(file.with_suffix(".status"))
    _write(file.with_suffix(".pid"), str(os.getpid()))
    interrupt_once()
    mistakes: tuple[type[BaseException], ...] = ()
    refusals: tuple[type[BaseException], ...] = ()
    try:
        prepare(num_threads(place.world))
        asked: Call = pickle.loads(call)
        mistakes, refusals = asked.mistakes, asked.refusals
        result = pickle.dumps(asked.function(place, status, *asked.args))
    except KeyboardInterrupt:
        os._exit(_INTERRUPTED)  # no failure: the launching process knows who was interrupted
    except BaseException as error:
        failure = from_exception(error, place.rank, time.monotonic(), status, mistakes, refusals)
        _write(file.with_suffix(".error"), to_json(failure))
        sys.stdout.flush()
        sys.stderr.flush()
        if failure.is_consequence:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(_YIELD_S)
        os._exit(1)
    _write(file.with_suffix(".done"), "")
    return result


def _write(file: Path, text: str) -> None:
    """Whole or not at all: the launching process may look at any moment."""
    part = file.with_name(file.name + ".part")
    part.write_text(text)
    part.replace(file)
