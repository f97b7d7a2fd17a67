"""Whether this machine can take the ranks of a run; asked before any of them is started."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.config.choices import DeviceKind
from meshwright.config.errors import RequestError

__all__ = ["check_devices", "check_machine", "check_ranks", "memory_bytes", "swap_bytes"]

# Ranks may share cores, as tests of large meshes do; thousands of processes would only stop the machine.
_RANKS_A_CORE, _RANKS_AT_LEAST = 16, 128


def check_machine(device: DeviceKind, ranks: int) -> None:
    """What every command asks before it starts ranks.

    Raises RequestError where this machine cannot take so many, or has no device for each.
    """
    check_ranks(ranks)
    check_devices(device, ranks)


def check_ranks(ranks: int) -> None:
    """Raise RequestError where there are more ranks than one machine can take at all. Imports nothing."""
    cores = os.cpu_count() or 1
    most = max(_RANKS_AT_LEAST, _RANKS_A_CORE * cores)
    if ranks > most:
        raise RequestError(
            f"{ranks} ranks on this machine of {cores} cores",
            f"at most {most} are started on one machine",
            ("a smaller mesh", "torchrun or Slurm on several machines"),
        )


def check_devices(device: DeviceKind, ranks: int) -> None:
    """Raise RequestError where the ranks would not find a device each. Needs torch."""
    if device is DeviceKind.CPU:
        return
    import torch

    from meshwright.comm.mesh import no_cuda

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is DeviceKind.CUDA and not found:
        raise no_cuda()
    if found and ranks > found:
        raise RequestError(
            f'{ranks} ranks with train.device = "{device}"',
            f"each takes a CUDA device of its own, and this machine has {found}",
            (f"a mesh of {found} ranks" if found > 1 else "a mesh of one rank", 'train.device = "cpu"'),
        )


def memory_bytes() -> float:
    """Physical memory, or what the container may use of it."""
    whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limits = map(_read, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    return min([whole, *(float(limit) for limit in limits if limit.isdecimal())])


def swap_bytes() -> float:
    """What physical memory may be written out to."""
    lines = (line.split() for line in _read("/proc/meminfo").splitlines())
    return sum(1024.0 * float(words[1]) for words in lines if words[:1] == ["SwapTotal:"])


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
