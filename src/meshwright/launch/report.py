"""Which of many failures was the first, and how it is told.

One rank's error takes the others with it: they see a closed connection, a timeout or a signal. These are consequences;
the cause is the earliest failure that is none. Everything here is pure.
"""

import json
import re
import signal
import traceback as traceback_module
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from meshwright.launch.environment import JoinError, PlaceError
from meshwright.launch.status import RankStatus, describe

# What gloo, NCCL and the store say when *another* rank ended or stopped answering.
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|pair closure|Broken pipe|Socket closed|connectFullMesh failed"
    r"|Timed out waiting \d+ms|remote process exited|[Cc]ommunicator was aborted|Failed to recv, got 0 bytes"
    r"|wait timeout after \d+ms|^stopped because of rank \d+"
)


@dataclass(frozen=True)
class Failure:
    """What ended one rank.

    Attributes:
        at: seconds of the host's monotonic clock.
        kind: the exception's type; empty for a process that ended without a word.
        exit_code: of such a process; negative: the signal; None: not known.
        traceback: empty when it would tell the user nothing (their own mistake) or there is none.
        refused: what was asked for cannot be done; nothing broke.
    """

    rank: int
    at: float
    kind: str = ""
    message: str = ""
    step: int | None = None
    phase: str = ""
    traceback: str = ""
    exit_code: int | None = None
    refused: bool = False

    @property
    def is_consequence(self) -> bool:
        """Another rank's end caused this one."""
        return bool(self.kind and _CONSEQUENCE.search(self.message))

    def line(self) -> str:
        """The closing line: `rank 1 failed at step 15, in backward: ValueError: ...`, or a refusal's message alone."""
        if self.refused:
            return f"error: {self.message}"
        where = describe(self.step, self.phase)
        where = f" {where}" if where else ""
        if self.kind:
            text = f"{self.kind}: {self.message}" if self.message else self.kind
            return f"rank {self.rank} failed{where}: {text}"
        return f"rank {self.rank} {_ending(self.exit_code)}{where}"


def from_exception(
    error: BaseException,
    rank: int,
    at: float,
    status: RankStatus,
    mistakes: tuple[type[BaseException], ...] = (),
    refusals: tuple[type[BaseException], ...] = (),
) -> Failure:
    """Describes an exception, its notes included; the user's mistakes and failures to meet without a traceback."""
    with_traceback = not isinstance(error, (PlaceError, JoinError, *mistakes, *refusals))
    frames = error.__traceback__.tb_next if error.__traceback__ else None  # the first frame is the catcher's own
    text = "".join(traceback_module.format_exception(type(error), error, frames)) if with_traceback else ""
    message = "\n".join([str(error), *getattr(error, "__notes__", [])])
    refused = isinstance(error, refusals)
    return Failure(rank, at, type(error).__name__, message, status.step, status.phase, text, refused=refused)


def to_json(failure: Failure) -> str:
    """One line that `from_json` reads back."""
    return json.dumps(asdict(failure))


def from_json(text: str) -> Failure:
    """Raises ValueError when `text` was not written by `to_json`."""
    fields = json.loads(text)
    if not isinstance(fields, Mapping):
        raise ValueError(f"no failure record: {text[:80]}")
    return Failure(**fields)


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The earliest cause; the earliest consequence when there is no cause; None without failures."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.at), default=None)


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "ended without a word (killed?)"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (the kernel does so when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
