"""What a run is priced for: a device, a node of them, the network between nodes, the software, the price. Frozen data.

device - link - node (devices) - network - ...       bytes a second are one way and a device everywhere
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from meshwright.config.errors import RequestError


class Attention(StrEnum):
    """Kernels of attention, oldest first."""

    UNFUSED = "unfused"
    TRITON = "triton"
    FLASH2 = "flash2"
    FLASH3 = "flash3"  # and the vendor's fused kernels of its time


class Elementwise(StrEnum):
    EAGER = "eager"
    FUSED = "fused"


class Host(StrEnum):
    """legacy: collectives wait for computation and computation for them; modern: gradient sums run under backward."""

    LEGACY = "legacy"
    MODERN = "modern"


class Loss(StrEnum):
    """How cross entropy is computed. auto: fused beside kernels whose packages bring one, triton and flash3."""

    AUTO = "auto"
    PLAIN = "plain"
    FUSED = "fused"


class Following(StrEnum):
    """literal: exactly the program that this project executes. usual: as large trainers do where it differs:
    updated parameters are gathered under the next forward, and messages between stages are cut over the tensor axis.
    """

    LITERAL = "literal"
    USUAL = "usual"


@dataclass(frozen=True, slots=True)
class Device:
    """`matrix_flops`: dense products a second by dtype, as on the data sheet; `matrix_share`: their achieved part."""

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    matrix_flops: Mapping[str, float]
    generation: str = ""  # whose measured shares a price takes: ampere, hopper, ..., cpu; "": of none, the usual ones
    processors: int = 1
    matrix_share: Mapping[str, float] = field(default_factory=dict)
    memory_share: float = 0.0  # 0: the model's own
    power_w: float = 0.0  # of this part, and what its stated peaks need: with less power the clock falls
    rated_power_w: float = 0.0

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are processes on processors: no contexts, no caching allocator, gloo in place of NCCL."""
        return self.generation == "cpu"

    @property
    def power_share(self) -> float:
        """Power over what the stated peak needs, at most 1."""
        return min(1.0, self.power_w / self.rated_power_w) if self.power_w and self.rated_power_w else 1.0


@dataclass(frozen=True, slots=True)
class Node:
    """`devices` share a link of `link_bytes_per_s`; `reduce_bytes_per_s`: bus bandwidth of all-reduces, where others
    than a ring's gathers (switches; gloo). `gain_alone`: how much faster a device computes while the others of its
    node wait, more than 1 where ranks share processors."""

    devices: int
    link_bytes_per_s: float
    link_latency_s: float = 3.4e-6
    measured_bytes_per_s: float = 0.0
    reduce_bytes_per_s: float = 0.0
    host_bytes_per_s: float = 25e9
    gain_alone: float = 1.0
    exchange_s: float = 0.0  # of a direct gather or scatter, besides its hop

    def neighbours(self, stride: int, size: int) -> int:
        """How many of `size` ranks, every `stride`-th one, share a node."""
        return min(max(self.devices // stride, 1), size)


@dataclass(frozen=True, slots=True)
class Network:
    """A device's share of the links between nodes; a measured figure is taken as it is. `shared`: the devices of a node
    have one adapter together, so that who is alone on it has all of it."""

    bytes_per_s: float
    latency_s: float = 14e-6
    measured_bytes_per_s: float = 0.0
    shared: bool = False
    exchange_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Software:
    """What the stack is: inputs, never guessed from a name.

    `release`: year.month of a stack with experts, "" for the latest. `share`: part of the blocks that
    `parallel.recompute` means. `predicted`: further tokens predicted in training (a block and a head each); -1: as
    the model was published. `products`: dtype of the products of blocks, "" for precision.compute.
    """

    attention: Attention = Attention.FLASH2
    elementwise: Elementwise = Elementwise.FUSED
    host: Host = Host.MODERN
    release: str = ""
    loss: Loss = Loss.AUTO
    following: Following = Following.USUAL
    grace: bool = False
    share: float = 1.0
    predicted: int = -1
    products: str = ""


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars an hour of one device; 0: unknown."""

    dollars_per_device_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """`constants`: of the price model (`constants.py`), as they were measured here."""

    name: str
    device: Device
    node: Node
    network: Network
    software: Software = Software()
    price: Cost = Cost()
    constants: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)


def year_month(release: str) -> tuple[int, int]:
    """(year, month) of `Software.release`, the year in two digits; a patch may follow. Raises RequestError."""
    year, month, *_ = [*release.split("."), ""]
    if not (year.isdecimal() and month.isdecimal() and 1 <= int(month) <= 12):
        raise RequestError(f'cluster.software.release = "{release}"', "must be year.month", ('"26.06"',))
    return int(year) % 100, int(month)
