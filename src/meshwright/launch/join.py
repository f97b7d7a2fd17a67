"""Makes and destroys the default process group of a rank.

gloo on CPU, NCCL on CUDA. The store is wrapped in a prefix of its own for each attempt: launchers keep one store
through restarts, and a rank that reads the addresses of a dead attempt cannot connect.
"""

import contextlib
import errno
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Public and documented, yet not in the list of what the package exports by name.
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from meshwright.launch.attempt import agree, all_connected
from meshwright.launch.environment import JoinError, Place

TIMEOUT_S = 60.0
# A stranger at the port is refused within 2 s by up to 250 ranks, the time that a busy machine takes to tell included.
HANDSHAKE_S, HANDSHAKE_PER_RANK_S = 1.25, 0.001
_RETRY_S = 0.05


def join(place: Place, device: str = "cpu", timeout_s: float = TIMEOUT_S) -> None:
    """Makes the default process group from a place a launcher gave.

    Args:
        device: "cpu" (gloo) or "cuda" (NCCL, on this host's device number `local_rank`).
        timeout_s: of this meeting and of every later collective.

    Raises:
        JoinError: the port is taken or held by a stranger (within 2 s of its first answer), another process has this
            rank, or some ranks did not arrive in time.
    """
    start_group(meet(place, timeout_s), place.rank, place.world, device, place.local_rank, timeout_s)


def meet(place: Place, timeout_s: float = TIMEOUT_S) -> Store:
    """The store of this attempt of the run, once every rank has come to it; raises JoinError as `join` does."""
    store = _open_store(place, timeout_s)
    try:
        attempt = agree(store, place.rank, place.world, place.run_id, timeout_s)
    except JoinError as error:
        raise JoinError(f"{error} (the store is at {place.master_addr}, port {place.master_port})") from None
    return PrefixStore(attempt, store)


def join_file(
    path: Path, rank: int, world: int, device: str = "cpu", timeout_s: float = TIMEOUT_S, attempt: str = "attempt-0"
) -> None:
    """Makes the default process group of ranks on one host that share a file; no port is opened for the meeting."""
    store = FileStore(str(path), world)
    start_group(PrefixStore(attempt, store), rank, world, device, rank, timeout_s)


def leave() -> None:
    """Destroys every process group of this rank. Nothing happens where there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def start_group(store: Store, rank: int, world: int, device: str, local_rank: int, timeout_s: float) -> None:
    """Makes the default process group of `world` ranks; `store` holds nothing of another group."""
    if device not in {"cpu", "cuda"}:
        raise ValueError(f"device {device!r} has no process group; cpu and cuda have")
    device_id = None
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise JoinError(
                f"rank {rank}: needs CUDA device {local_rank} of this host, which has {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(local_rank)
        device_id = torch.device("cuda", local_rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
        device_id=device_id,
    )
    all_connected(store, rank, world, timeout_s)


def _open_store(place: Place, timeout_s: float) -> Store:
    """The store of the run: served by rank 0, or by the launcher, else a client of it."""
    serves = place.rank == 0 and not place.agent_store
    where = f"MASTER_PORT {place.master_port} on {place.master_addr}"
    if serves:
        try:
            # Asked beforehand, for the store prints pages of C++ warnings when the port is taken.
            socket.create_server(("", place.master_port)).close()
            return _tcp_store(place, serves=True, timeout_s=timeout_s)
        except (OSError, dist.DistNetworkError) as error:
            taken = getattr(error, "errno", None) == errno.EADDRINUSE or "EADDRINUSE" in str(error)
            reason = "is in use by another program" if taken else "cannot be opened"
            raise JoinError(f"{where} {reason}; choose a free one (--master-port of torchrun)") from None
    _await_listener(place, timeout_s)
    store = _greet(place, timeout_s)
    if store is None:
        raise JoinError(
            f"{where} is held by another program, no torch.distributed store; choose a free one "
            "(--master-port of torchrun)"
        )
    return store


def _greet(place: Place, timeout_s: float) -> TCPStore | None:
    """A client of the store, or None when what listens does not answer as one.

    The client's constructor waits for ever on a listener that accepts and stays silent, whatever its timeout; so it
    runs in a thread that is left behind (a daemon) when it takes too long. Many ranks greet at once: each adds a bit.
    """
    stores: list[TCPStore] = []

    def connect() -> None:
        with contextlib.suppress(RuntimeError):  # the base of every torch.distributed error: not a store
            stores.append(_tcp_store(place, serves=False, timeout_s=timeout_s))

    thread = threading.Thread(target=connect, name="store-greeting", daemon=True)
    thread.start()
    thread.join(HANDSHAKE_S + HANDSHAKE_PER_RANK_S * place.world)
    return stores[0] if stores else None


def _tcp_store(place: Place, serves: bool, timeout_s: float) -> TCPStore:
    return TCPStore(
        host_name=place.master_addr,
        port=place.master_port,
        world_size=place.world,
        is_master=serves,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def _await_listener(place: Place, timeout_s: float) -> None:
    """Waits until somebody listens: rank 0 may still be importing. Who it is, is asked afterwards, and briefly."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((place.master_addr, place.master_port), timeout=HANDSHAKE_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise JoinError(
                    f"rank {place.rank}: nobody answers at MASTER_ADDR {place.master_addr}, MASTER_PORT "
                    f"{place.master_port} after {timeout_s:g} s ({error.strerror or error}); did rank 0 start?"
                ) from None
            time.sleep(_RETRY_S)
