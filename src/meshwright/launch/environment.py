"""The one file that reads the process environment: which place a launcher gave this process.

    torchrun   RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT   (any launcher that speaks env://)
    Slurm      SLURM_PROCID SLURM_NTASKS SLURM_LOCALID, first host of SLURM_NODELIST, port from SLURM_JOB_ID
    neither    None: the command starts the ranks itself

The environment may hold secrets: nothing here prints a variable that it does not itself understand.
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

# Ports of Slurm jobs: below the range Linux hands out by itself (32768 and up), derived from the job so that all tasks
# agree without talking and two jobs on one host seldom meet (when they do, joining refuses the foreign one).
_SLURM_FIRST_PORT, _SLURM_NUM_PORTS = 20_000, 10_000
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Launcher(Enum):
    """Who started this process."""

    LOCAL = "local"
    TORCHRUN = "torchrun"
    SLURM = "slurm"


class PlaceError(ValueError):
    """The environment contradicts itself. One line: the values and what would be right."""


class JoinError(RuntimeError):
    """The ranks of this run could not meet. One line that says where and why."""


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks of its run.

    Attributes:
        rank: 0 <= rank < world.
        local_rank: number of this process on its host; its device.
        master_addr, master_port: where rank 0's store listens.
        run_id: equal on every rank of one run; what a joining rank shows, so that a foreign listener is noticed.
        restart_count: restarts of the run so far, as far as this host knows.
        agent_store: the launcher itself serves the store; rank 0 must not.
    """

    rank: int
    world: int
    local_rank: int
    master_addr: str
    master_port: int
    launcher: Launcher
    run_id: str = ""
    restart_count: int = 0
    agent_store: bool = False


def detect(environment: Mapping[str, str] | None = None) -> Place | None:
    """Finds this process's place, or None outside every launcher.

    torchrun's variables win inside a Slurm job, for `srun torchrun` is common. A shell on a Slurm node (SLURM_JOB_ID
    without SLURM_PROCID, or the allocation's step of one task that is no `srun`) is no launcher.

    Raises:
        PlaceError: variables are missing, are no numbers, or contradict each other.
    """
    values = os.environ if environment is None else environment
    if "RANK" in values and "WORLD_SIZE" in values:
        return _torchrun(values)
    if "SLURM_PROCID" in values and "SLURM_STEP_ID" in values:
        return _slurm(values)
    half = [name for name in ("RANK", "WORLD_SIZE") if name in values]
    if half:
        missing = next(name for name in ("RANK", "WORLD_SIZE") if name not in values)
        raise PlaceError(
            f"{half[0]}={values[half[0]]} is set but {missing} is not; a launcher sets both (torchrun does); "
            f"unset {half[0]} to start the ranks from here"
        )
    return None


def snapshot() -> dict[str, str]:
    """This process's environment, to be handed to ranks: the fork server knows only the one it was started with."""
    return dict(os.environ)


def local_snapshot() -> dict[str, str]:
    """The snapshot for ranks that are all on this host: gloo then talks over loopback, unless the user says otherwise.

    By itself gloo asks what address the host's name has, which on many a laptop is none or one that changes.
    """
    loopback = next((name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)), None)
    return ({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}) | snapshot()


def snapshot_of(place: Place) -> dict[str, str]:
    """The snapshot for a process that stands in for the rank at `place`: it comes to the store as a client, for the
    rank's own process, or the launcher, serves it already."""
    return snapshot() | {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world),
        "LOCAL_RANK": str(place.local_rank),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def adopt(environment: Mapping[str, str], keep: frozenset[str] = frozenset()) -> None:
    """Makes `environment` this process's environment, except the names in `keep`."""
    kept = {name: os.environ[name] for name in keep if name in os.environ}
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(kept)


def quiet_profiler() -> None:
    """Keeps torch's profiler from telling on standard error that it begins and ends, unless the user asked it to."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def num_threads(world: int, environment: Mapping[str, str] | None = None) -> int | None:
    """Threads of a rank's operations: the user's OMP_NUM_THREADS, else 1 for several ranks, else None (torch's choice).

    Raises:
        PlaceError: OMP_NUM_THREADS is no positive number.
    """
    values = os.environ if environment is None else environment
    text = values.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # OpenMP allows one number a nesting level
    if text:
        count = _number({"OMP_NUM_THREADS": text}, "OMP_NUM_THREADS")
        if count < 1:
            raise PlaceError(f"OMP_NUM_THREADS={text} must be at least 1")
        return count
    return 1 if world > 1 else None


def _torchrun(values: Mapping[str, str]) -> Place:
    missing = [name for name in _TORCHRUN if name not in values]
    if missing:
        raise PlaceError(
            f"RANK={values['RANK']} and WORLD_SIZE={values['WORLD_SIZE']} are set but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not; torchrun sets all four; unset RANK and WORLD_SIZE to start "
            "the ranks from here"
        )
    rank, world = _number(values, "RANK"), _number(values, "WORLD_SIZE")
    local_rank = _number(values, "LOCAL_RANK") if "LOCAL_RANK" in values else rank
    _check("RANK", rank, "WORLD_SIZE", world)
    if "LOCAL_WORLD_SIZE" in values:
        local_world = _number(values, "LOCAL_WORLD_SIZE")
        _check("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world)
        if local_world > world:
            raise PlaceError(f"LOCAL_WORLD_SIZE={local_world} exceeds WORLD_SIZE={world}")
    return Place(
        rank=rank,
        world=world,
        local_rank=local_rank,
        master_addr=values["MASTER_ADDR"],
        master_port=_port(values, "MASTER_PORT"),
        launcher=Launcher.TORCHRUN,
        run_id=values.get("TORCHELASTIC_RUN_ID", ""),
        restart_count=_number(values, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in values else 0,
        agent_store=values.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _slurm(values: Mapping[str, str]) -> Place | None:
    missing = [name for name in ("SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID") if name not in values]
    if missing:
        raise PlaceError(f"SLURM_PROCID={values['SLURM_PROCID']} is set but {' and '.join(missing)} is not; use srun")
    rank, job = _number(values, "SLURM_PROCID"), _number(values, "SLURM_JOB_ID")
    # The step's own count: an allocation of 8 tasks may run `srun -n 2`.
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in values else "SLURM_NTASKS"
    world = _number(values, count)
    _check("SLURM_PROCID", rank, count, world)
    if world == 1 and values.get("SLURM_STEP_ID") in {"4294967290", "4294967291", "4294967294"}:
        return None  # interactive, batch and extern steps: a shell, not a task of srun
    hosts = values.get("SLURM_STEP_NODELIST") or values.get("SLURM_NODELIST") or values.get("SLURM_JOB_NODELIST")
    address = values.get("MASTER_ADDR") or (first_host(hosts) if hosts else None)
    if address is None:
        raise PlaceError("SLURM_PROCID is set but neither SLURM_NODELIST nor MASTER_ADDR is; use srun")
    return Place(
        rank=rank,
        world=world,
        local_rank=_number(values, "SLURM_LOCALID"),
        master_addr=address,
        master_port=_port(values, "MASTER_PORT") if "MASTER_PORT" in values else _slurm_port(job),
        launcher=Launcher.SLURM,
        run_id=f"slurm-{job}-{values['SLURM_STEP_ID']}",
        restart_count=_number(values, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in values else 0,
    )


def _slurm_port(job: int) -> int:
    return _SLURM_FIRST_PORT + job % _SLURM_NUM_PORTS


def first_host(nodelist: str) -> str:
    """First host of Slurm's compressed list: `gpu[007-009,12],login` -> `gpu007`.

    Raises:
        PlaceError: the list has no first host.
    """
    match = re.match(r"([^,\[\]\s]+)(?:\[([^\],-]+)[^\]]*\]([^,\[\s]*))?", nodelist)
    if match is None:
        raise PlaceError(f"SLURM_NODELIST={nodelist!r} names no host")
    name, number, tail = match.groups()
    return name + (number or "") + (tail or "")


def _number(values: Mapping[str, str], name: str) -> int:
    text = values[name].strip()
    if not re.fullmatch(r"-?[0-9]+", text):
        raise PlaceError(f"{name}={text} is not a whole number")
    return int(text)


def _port(values: Mapping[str, str], name: str) -> int:
    port = _number(values, name)
    if not 0 < port < 65536:
        raise PlaceError(f"{name}={port} is no port; ports are 1 to 65535")
    return port


def _check(name: str, rank: int, bound_name: str, bound: int) -> None:
    if bound < 1:
        raise PlaceError(f"{bound_name}={bound} must be at least 1")
    if not 0 <= rank < bound:
        raise PlaceError(f"{name}={rank} must be from 0 to {bound_name} - 1 = {bound - 1}")
