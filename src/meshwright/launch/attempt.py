"""How the ranks of one attempt find each other in a store that remembers earlier attempts.

A launcher that restarts ranks keeps its store, and each host counts restarts for itself; so no number in the
environment names an attempt safely. Instead every rank says hello with a fresh nonce and rank 0 answers:

    rank 0        run       = the run's id               (who finds another one here is at the wrong port)
    rank r        hello/r   = nonce                     (overwrites what a dead predecessor left)
    rank 0        roll      = attempt, every nonce       (again whenever a hello changes)
    rank r        ack/attempt/r                          (when the roll holds its nonce)
    rank 0        go/attempt                             (when all have acknowledged this very roll)

A stale roll never holds a fresh nonce, so nobody follows it. A hello replaced by another process means two processes
claim one rank: an error at once instead of a wrong sum.

Then the group is made, which on gloo connects every pair of ranks. A rank whose own connections stand may not use the
group yet, for it might leave while two others are still greeting, and these would find a closed connection:

    rank r        connects ... connected += 1
    the last      all connected                          everybody waits for this
    rank r        heard += 1
    the last      all heard                              rank 0 waits for this: it may serve the store
"""

import json
import secrets
import time
from datetime import timedelta
from typing import Protocol

from meshwright.launch.environment import JoinError

_POLL_S = 0.005
_RUN, _ROLL = "meshwright/run", "meshwright/roll"


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


def agree(store: Store, rank: int, world: int, run_id: str, timeout_s: float) -> str:
    """Returns the name of this attempt, equal on all ranks and never used before in this store.

    Raises:
        JoinError: some ranks did not come within `timeout_s`, another process claims this rank, or the store is
            another run's. One line.
    """
    nonce = secrets.token_hex(8)
    store.set(_hello(rank), nonce)
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        store.set(_RUN, run_id)
        return _call_roll(store, nonce, world, deadline, timeout_s)
    return _answer(store, rank, nonce, run_id, deadline, timeout_s)


def all_connected(store: Store, rank: int, world: int, timeout_s: float) -> None:
    """Returns when every rank has called this in this attempt; `store` holds nothing of another one.

    Raises:
        JoinError: some ranks did not within `timeout_s`. One line.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        _count(store, "connected", world)
        store.wait(["all connected"], timeout)
        _count(store, "heard", world)
        if rank == 0:
            store.wait(["all heard"], timeout)
    except RuntimeError as error:  # the base of every torch.distributed error
        raise JoinError(f"rank {rank}: not all of {world} ranks were connected within {timeout_s:g} s") from error


def _count(store: Store, key: str, world: int) -> None:
    if store.add(key, 1) == world:
        store.set(f"all {key}", "")


def _hello(rank: int) -> str:
    return f"meshwright/hello/{rank}"


def _call_roll(store: Store, nonce: str, world: int, deadline: float, timeout_s: float) -> str:
    called: list[str] = []
    attempt = ""
    while time.monotonic() < deadline:
        arrived = [rank for rank in range(world) if store.check([_hello(rank)])]
        if len(arrived) == world:
            nonces = [store.get(_hello(rank)).decode() for rank in range(world)]
            _check_own(nonces[0], nonce, 0)
            if nonces != called:
                called, attempt = nonces, secrets.token_hex(8)
                store.set(_ROLL, json.dumps([attempt, nonces]))
            if store.check([f"meshwright/ack/{attempt}/{rank}" for rank in range(1, world)]):
                store.set(f"meshwright/go/{attempt}", "")
                return attempt
        time.sleep(_POLL_S)
    missing = [
        rank
        for rank in range(1, world)
        if not store.check([f"meshwright/ack/{attempt}/{rank}" if attempt else _hello(rank)])
    ]
    raise JoinError(f"rank 0: ranks {missing} of {world} did not arrive within {timeout_s:g} s")


def _answer(store: Store, rank: int, nonce: str, run_id: str, deadline: float, timeout_s: float) -> str:
    acknowledged = ""
    while time.monotonic() < deadline:
        _check_own(store.get(_hello(rank)).decode(), nonce, rank)
        if store.check([_RUN]) and (other := store.get(_RUN).decode()) != run_id:
            raise JoinError(
                f"rank {rank} of run {run_id!r} reached the store of run {other!r}: do two runs share a port?"
            )
        if store.check([_ROLL]):
            attempt, nonces = json.loads(store.get(_ROLL))
            if rank < len(nonces) and nonces[rank] == nonce:
                if attempt != acknowledged:
                    store.set(f"meshwright/ack/{attempt}/{rank}", "")
                    acknowledged = attempt
                if store.check([f"meshwright/go/{attempt}"]):
                    return str(attempt)
        time.sleep(_POLL_S)
    waits = "for the others" if acknowledged else "for rank 0"
    raise JoinError(f"rank {rank}: waited {timeout_s:g} s {waits}")


def _check_own(found: str, nonce: str, rank: int) -> None:
    if found != nonce:
        raise JoinError(f"two processes claim rank {rank} in one store: do two runs share a port?")
