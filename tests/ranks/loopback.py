"""What two ranks put on the loopback interface of a network namespace of their own. Run as a program, as root.

interface    every packet has 20 bytes of IP and 32 of TCP (with timestamps); lost ones are counted again
streams      what TCP brought to the other end, each byte once
messages     gloo puts a preamble of 48 bytes (operation, slot, offsets, sizes) before each, and announces it with
             one more in either direction: a message costs the two streams of a pair three preambles a direction

messages that one of two ranks receives
    a send, a chunk of an all-gather or a reduce-scatter       1
    an all-reduce, in a ring of two segments a rank            4     (its one segment, of a single number: 1)
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.comm.mesh import Mesh
from meshwright.parallel.engine import Engine
from meshwright.plan.folds.ledger import Row
from meshwright.plan.folds.traffic import SCALAR_BYTES, Operation
from meshwright.plan.plan import Plan
from meshwright.testing.ranks import run_cases
from meshwright.verify.batches import global_batches, local_share
from tests.unit.plan.plans import make_plan

PACKET, PREAMBLE, PREAMBLES = 20 + 32, 48, 3
CASES = {"zero 0": (0, False), "zero 3": (3, False), "zero 3, shared memory": (3, True)}
"""Stage, and whether parameters are read where they lie instead of sent."""
_NEW_NETWORK, _GET_FLAGS, _SET_FLAGS, _UP = 0x40000000, 0x8913, 0x8914, 1
_BYTES_RECEIVED, _BYTES_SENT = 128, 200  # offsets in struct tcp_info


def plan_of(zero: int) -> Plan:
    plan = make_plan(dp=2, zero=zero, micro=2, accumulation=2)
    return replace(plan, data=replace(plan.data, sequence_length=16))


def own_network() -> bool:
    """A namespace with a loopback of its own, for this process and those it starts; False without the right to."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(any_socket, _GET_FLAGS, request), 16)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))
    return True


def interface() -> tuple[int, int]:
    """(bytes, packets) sent over loopback."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    figures = line.split(":")[1].split()
    return int(figures[8]), int(figures[9])


def streams() -> tuple[int, int]:
    """(sent, received) bytes of all TCP streams of this process, without any header."""
    sent = received = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as stream:
                if stream.type != socket.SOCK_STREAM or stream.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                told = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
        except OSError:  # closed meanwhile
            continue
        sent += struct.unpack_from("Q", told, _BYTES_SENT)[0]
        received += struct.unpack_from("Q", told, _BYTES_RECEIVED)[0]
    return sent, received


def at_rest(read: Any) -> Any:
    """What `read` says once it says the same for a while: gloo's threads have written what they had to."""
    last, since = read(), time.monotonic()
    while time.monotonic() - since < 0.5:
        time.sleep(0.02)
        now = read()
        if now != last:
            last, since = now, time.monotonic()
    return last


def meet(folder: str, name: str, rank: int) -> None:
    """Both ranks have come here; without a byte on the network."""
    (Path(folder) / f"{name}-{rank}").touch()
    while not (Path(folder) / f"{name}-{1 - rank}").exists():
        time.sleep(0.005)


def measure(rank: int, name: str, folder: str) -> dict[str, Any]:
    zero, shares_memory = CASES[name]
    plan = plan_of(zero)
    mesh = Mesh.of(plan).start()
    mesh.shares_memory = shares_memory
    engine = Engine(plan, mesh)
    batches = [local_share(plan, batch, rank) for batch in global_batches(plan, 2)]
    engine.step(batches[0], 1e-3)
    before = at_rest(lambda: (streams(), interface()))
    meet(folder, f"{name}-begin", rank)
    engine.step(batches[1], 1e-3)
    meet(folder, f"{name}-end", rank)
    after = at_rest(lambda: (streams(), interface()))
    meet(folder, f"{name}-read", rank)
    return {
        "sent": after[0][0] - before[0][0],
        "received": after[0][1] - before[0][1],
        "interface": after[1][0] - before[1][0],
        "packets": after[1][1] - before[1][1],
    }


def messages(row: Row) -> int:
    """Messages of a row's calls, by the table above."""
    if row.operation is not Operation.ALL_REDUCE:
        return row.calls
    return row.calls if row.payload_bytes == row.calls * SCALAR_BYTES else 4 * row.calls


def main() -> None:
    if not own_network():
        print(json.dumps(None))
        return
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_cases(measure, 2, list(CASES), folder, timeout=100)
    print(json.dumps({name: [of_rank[number] for of_rank in ranks] for number, name in enumerate(CASES)}))


if __name__ == "__main__":
    sys.exit(main())
