"""Meeting through a port: taken, foreign, absent and shared ones are refused quickly, and restarts do not mix."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.agree import Side
from meshwright.comm.mesh import Mesh
from meshwright.launch.environment import Launcher, Place
from meshwright.launch.join import HANDSHAKE_PER_RANK_S, HANDSHAKE_S, JoinError, join, join_file, leave
from meshwright.testing.ranks import run


@pytest.fixture
def mute_port() -> Iterator[int]:
    """A port whose owner accepts connections and never says a word."""
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    accepted.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    for connection in accepted:
        connection.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _place(rank: int, world: int, port: int, agent_store: bool = False) -> Place:
    return Place(rank, world, rank, "127.0.0.1", port, Launcher.TORCHRUN, agent_store=agent_store)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_held_by_a_stranger_is_refused(rank: int, mute_port: int) -> None:
    begin = time.monotonic()
    with pytest.raises(JoinError, match=f"MASTER_PORT {mute_port} on 127.0.0.1 is") as refusal:
        join(_place(rank, 2, mute_port))
    assert time.monotonic() - begin < 2
    assert "\n" not in str(refusal.value)
    assert not dist.is_initialized()


@pytest.mark.parametrize("world", [2, 64, 250])
def test_the_wait_for_a_stranger_leaves_time_to_tell(world: int) -> None:
    assert HANDSHAKE_S + HANDSHAKE_PER_RANK_S * world <= 1.5


def test_nobody_at_the_port_is_told() -> None:
    port = _free_port()
    with pytest.raises(JoinError, match=f"nobody answers at MASTER_ADDR 127.0.0.1, MASTER_PORT {port}"):
        join(_place(1, 2, port), timeout_s=0.5)


def _meet(rank: int, world: int, port: int, times: int) -> list[float]:
    """Meets `times` times in one store, as restarts under a launcher do; the store lives in rank 0."""
    leave()
    from meshwright.launch import join as module

    sums = []
    keeper: Any = None
    for attempt in range(times):
        # From the second time on, rank 0 is a client as well: the launcher's store.
        place = _place(rank, world, port, agent_store=attempt > 0)
        if keeper is None:
            keeper = module._open_store(place, 20.0) if rank == 0 else None
            place = _place(rank, world, port, agent_store=True)
        module.join(place, timeout_s=20.0)
        x = torch.ones(1) * (rank + 1)
        dist.all_reduce(x)
        sums.append(float(x[0]))
        leave()
    # The store must outlive every client's last word.
    module.join(_place(rank, world, port, agent_store=True), timeout_s=20.0)
    dist.barrier()
    return sums


def test_restarts_in_one_store_do_not_mix() -> None:
    assert run(_meet, 3, 3, _free_port(), 3) == [[6.0] * 3] * 3


def _meet_by_env(rank: int, world: int, port: int) -> float:
    leave()
    if rank == 0:
        time.sleep(0.5)  # the others wait for the port to open
    join(_place(rank, world, port))
    x = torch.ones(1)
    dist.all_reduce(x)
    return float(x[0])


def test_rank_zero_serves_the_store_and_may_come_late() -> None:
    assert run(_meet_by_env, 2, 2, _free_port()) == [2.0, 2.0]


def come_and_go(rank: int, folder: str) -> int:
    """Groups that are left as soon as they are there, of 4 ranks and of 3, with groups inside them and without."""
    leave()
    for meeting in range(12):
        world = 4 - meeting % 2
        if rank < world:
            join_file(Path(folder) / str(meeting), rank, world)
            if meeting % 4 == 2:
                mesh = Mesh(dp=2, pp=2).start()
                Side().close()
                mesh.close()
            leave()
    return rank


def test_a_rank_may_leave_at_once(tmp_path: Path) -> None:
    """Without a word from all, the slower ones find the connections of the quicker closed while they make their own."""
    assert run(come_and_go, 4, str(tmp_path)) == [0, 1, 2, 3]
