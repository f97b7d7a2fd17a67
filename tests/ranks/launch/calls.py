"""What the ranks of the launch tests do; `programs` runs it by name."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.launch.environment import Place
from meshwright.launch.join import join, leave
from meshwright.launch.status import RankStatus


class MistakeError(ValueError):
    """Told without a traceback."""


def sums(place: Place, status: RankStatus, folder: str) -> float:
    join(place)
    x = torch.ones(2) * (place.rank + 1)
    dist.all_reduce(x)
    leave()
    return float(x[0])


def _steps(place: Place, status: RankStatus, folder: str, trouble: str) -> None:
    join(place)
    (Path(folder) / f"pid-{place.rank}").write_text(str(os.getpid()))
    for step in range(100_000):
        status.at(step, "forward")
        dist.all_reduce(torch.ones(4))
        status.at(step, "backward")
        if step == 7 and place.rank == 1:
            (Path(folder) / "failed").write_text("")  # its time is what the tests measure from, to that of "ended"
            _make(trouble)
        if trouble == "endless":
            time.sleep(0.01)


def _make(trouble: str) -> None:
    if trouble == "raise":
        raise ValueError("the seventh seal\nwas opened")
    if trouble == "mistake":
        raise MistakeError("value 3; must be even")
    if trouble == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if trouble == "exit":
        sys.exit(3)


def raises(place: Place, status: RankStatus, folder: str) -> None:
    _steps(place, status, folder, "raise")


def mistakes(place: Place, status: RankStatus, folder: str) -> None:
    _steps(place, status, folder, "mistake")


def killed(place: Place, status: RankStatus, folder: str) -> None:
    _steps(place, status, folder, "kill")


def exits(place: Place, status: RankStatus, folder: str) -> None:
    _steps(place, status, folder, "exit")


def endless(place: Place, status: RankStatus, folder: str) -> None:
    _steps(place, status, folder, "endless")


def raises_beside_a_deaf_rank(place: Place, status: RankStatus, folder: str) -> None:
    """Rank 0 hangs and ignores SIGTERM; only SIGKILL ends it."""
    status.at(3, "forward")
    if place.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (Path(folder) / "deaf").write_text("")
        while True:
            time.sleep(1)
    while not (Path(folder) / "deaf").exists():
        time.sleep(0.01)
    (Path(folder) / "failed").write_text("")
    raise ValueError("nobody listens")


def raises_before_joining(place: Place, status: RankStatus, folder: str) -> None:
    if place.rank == 0:
        (Path(folder) / "failed").write_text("")
        raise ValueError("too early")
    join(place)


def saves(place: Place, status: RankStatus, folder: str) -> str:
    """Leaves its loop on SIGTERM and takes a while to save."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: asked.append(signum))
    (Path(folder) / f"pid-{place.rank}").write_text(str(os.getpid()))
    while not asked:
        time.sleep(0.01)
    time.sleep(0.5)
    (Path(folder) / f"saved-{place.rank}").write_text("")
    return "saved"


def dies_once(place: Place, status: RankStatus) -> None:
    """Rank 1 is killed in the first attempt; a later one runs to the end. They meet as a program of one's own does."""
    mesh = mw.Mesh(dp=place.world).start()
    for step in range(20):
        status.at(step, "forward")
        dist.all_reduce(torch.ones(4))
        if step == 10 and place.rank == 1 and place.restart_count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    mesh.close()
    print(
        f"rank {place.rank} ended attempt {place.restart_count}\n", end="", flush=True
    )  # in one write: ranks share it
