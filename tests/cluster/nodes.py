"""Two nodes on one machine: network namespaces joined by a veth pair whose two ends let through a stated rate.

    node 0, core 0                                        node 1, core 1
    rank 0 --.          10.77.0.1       10.77.0.2          .-- rank 2
             lo  ------- veth ===== rate ===== veth ------ lo
    rank 1 --'        tbf, one way    tbf, one way         '-- rank 3

Traffic between ranks of a node goes to the node's own address, which the kernel leads over loopback: it never meets the
filter. A guard process removes both namespaces when this process ends, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PORT = 29577
_PR_SET_PDEATHSIG = 1
_SEGMENT_BYTES = 32768  # as the kernel hands them to a device; a filter cuts larger ones than its burst into packets
_BURST_BYTES = 40000  # what a filter lets through unasked after a pause: little, or short messages would cost nothing
_QUEUE = "400ms"  # a queue that drops nothing: senders fill it and wait


def missing() -> str | None:
    """Why two nodes cannot be made here; None where they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (package iproute2)"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    if len(os.sched_getaffinity(0)) < 2:
        return "each node needs a core"
    name = f"mw-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"this kernel or container refuses network namespaces: {made.stderr.strip()}"
    shaped = _inside(name, "tc qdisc add dev lo root tbf rate 1gbit burst 64kb latency 50ms", check=False)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None if shaped.returncode == 0 else f"this kernel has no token bucket filter: {shaped.stderr.strip()}"


@dataclass(frozen=True)
class Nodes:
    """Names of the namespaces, and the core that all ranks of each share."""

    names: tuple[str, str]
    cores: tuple[int, int]
    devices: int = 2

    def start(self, command: Sequence[str], folder: Path) -> list[subprocess.Popen[bytes]]:
        """`command` on every rank of both nodes, as a launcher would; output in folder/rank-N.log."""
        world = 2 * self.devices
        started = []
        for rank in range(world):
            node, local = divmod(rank, self.devices)
            variables = {
                "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": self.devices,
                "MASTER_ADDR": _address(0), "MASTER_PORT": _PORT, "GLOO_SOCKET_IFNAME": "veth", "OMP_NUM_THREADS": 1,
            }  # fmt: skip
            inside = ["ip", "netns", "exec", self.names[node], "taskset", "-c", str(self.cores[node]), *command]
            with (folder / f"rank-{rank}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        inside,
                        env=os.environ | {name: str(value) for name, value in variables.items()},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        preexec_fn=_end_with_parent,
                    )
                )
        return started

    def run(self, command: Sequence[str], timeout_s: float) -> str:
        """The same to its end; what rank 0 wrote. Raises AssertionError with every rank's output where one failed."""
        with tempfile.TemporaryDirectory(prefix="meshwright-nodes-") as name:
            folder = Path(name)
            ranks = self.start(command, folder)
            deadline = time.monotonic() + timeout_s
            try:
                while (codes := [rank.poll() for rank in ranks]).count(0) < len(ranks):
                    failed = any(code for code in codes)
                    if failed or time.monotonic() > deadline:
                        logs = (f"--- rank {rank}\n{_log(folder, rank)}" for rank in range(len(ranks)))
                        raise AssertionError("\n".join([f"exit codes {codes} after {timeout_s:g} s at most", *logs]))
                    time.sleep(0.05)
                return _log(folder, 0)
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()


@contextmanager
def two_nodes(bytes_per_s: float) -> Iterator[Nodes]:
    """Both nodes, joined by a link of `bytes_per_s` one way; gone afterwards."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    nodes = Nodes((f"mw-{os.getpid()}-0", f"mw-{os.getpid()}-1"), (cores[0], cores[1]))
    guard = _guard(nodes.names)
    try:
        for name in nodes.names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        ends = [f"mwv{os.getpid() % 100_000}{side}" for side in "ab"]
        subprocess.run(["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]], check=True)
        for node, (name, end) in enumerate(zip(nodes.names, ends, strict=True)):
            subprocess.run(["ip", "link", "set", end, "netns", name, "name", "veth"], check=True)
            rate = f"rate {int(bytes_per_s * 8)}bit burst {_BURST_BYTES} latency {_QUEUE}"
            for line in (
                f"ip addr add {_address(node)}/24 dev veth",
                "ip link set lo up",
                f"ip link set veth mtu 9000 gso_max_size {_SEGMENT_BYTES} up",
                f"tc qdisc add dev veth root tbf {rate}",
            ):
                _inside(name, line)
        yield nodes
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


def left_behind() -> list[str]:
    """Namespaces of this process that still exist."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[0] for line in listed if line.startswith(f"mw-{os.getpid()}-")]


def _guard(names: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that waits for this one to close its pipe, by its own will or by its end, and removes the namespaces;
    a veth pair goes with them. It is in a session of its own: no signal to this process's group reaches it."""
    removal = "; ".join(f"ip netns del {name}" for name in names)
    return subprocess.Popen(
        ["sh", "-c", f"trap '' INT TERM HUP; read line; {{ {removal}; }} 2>/dev/null"],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def _inside(name: str, line: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = ["ip", "netns", "exec", name, *line.split()]
    return subprocess.run(command, check=check, capture_output=True, text=True)


def _address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def _log(folder: Path, rank: int) -> str:
    with suppress(FileNotFoundError):
        return (folder / f"rank-{rank}.log").read_text(errors="replace")
    return ""


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
