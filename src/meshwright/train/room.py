"""Whether the memory that a run takes is there at all: its forecast beside what the machine or the device has.

Refused is only what cannot go well: a forecast of all tensors, less what it may be off, above all memory there is.
Kernels end such a run without a word, or a device in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from meshwright.config.choices import DeviceKind
from meshwright.config.errors import RequestError
from meshwright.layout.axes import Coordinates
from meshwright.observe.figures import bytes_text
from meshwright.plan.folds.memory import memory
from meshwright.plan.folds.traffic import Transport
from meshwright.plan.plan import Plan
from meshwright.price.folded import steady
from meshwright.train.machine import memory_bytes, swap_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["check_machine_room", "check_rank_room"]

_SURELY = 0.9  # forecasts are within 5 % of what is measured, and a first step is held to that


def check_machine_room(plan: Plan, device: DeviceKind, copies: int = 1) -> None:
    """Before all ranks of `copies` such runs start on this machine and share its memory. Raises RequestError."""
    if device is not DeviceKind.CPU:
        import torch

        if torch.cuda.is_available():
            return  # each rank asks its own
    ranks = plan.degrees.ranks * copies
    needed = sum(_peaks(plan, range(plan.degrees.pp), Transport.DIRECT)) * (ranks // plan.degrees.pp)
    _check(needed, memory_bytes() + swap_bytes(), f"the {ranks} ranks" if ranks > 1 else "the run", "this machine has")


def check_rank_room(plan: Plan, rank: int, device: torch.device) -> None:
    """Before a rank builds its model on a device, or on its machine. Raises RequestError."""
    import torch

    on_cuda = device.type == "cuda"
    num_bytes = torch.cuda.mem_get_info(device)[1] if on_cuda else memory_bytes() + swap_bytes()
    transport = Transport.NCCL if on_cuda else Transport.DIRECT
    (needed,) = _peaks(plan, [plan.degrees.coordinates(rank).pp], transport, fused_norms=on_cuda)
    _check(needed, num_bytes, f"rank {rank}", "its device has" if on_cuda else "its machine has")


def _check(needed: float, there: float, who: str, holder: str) -> None:
    if needed * _SURELY > there:
        raise RequestError(
            f"{bytes_text(needed)} of memory, which {who} would hold at the fullest moment",
            f"{holder} {bytes_text(there)}",
            ("a layout that `meshwright plan` finds to fit", "a smaller batch.micro, data.sequence_length or model"),
        )


def _peaks(plan: Plan, stages: Iterable[int], transport: Transport, *, fused_norms: bool = False) -> list[int]:
    few = steady(plan)
    ranks = (few.degrees.rank(Coordinates(pp=stage)) for stage in stages)
    return [memory(few, rank, transport=transport, fused_norms=fused_norms).peak_bytes for rank in ranks]
