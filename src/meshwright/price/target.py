"""What the closed forms read of a cluster and a run besides layouts: rates in plain numbers, resolved once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.arch.arch import Arch
from meshwright.config.choices import Dtype, Family
from meshwright.config.errors import RequestError
from meshwright.plan.plan import Plan, Precision
from meshwright.price.cluster import Attention, Cluster, Elementwise, Following, Host, Loss, year_month
from meshwright.price.constants import VALUES
from meshwright.price.layouts import Array
from meshwright.price.shapes import Shapes, shapes

_PLAIN_UPDATE, _GRADIENT_PASS = 16.0, 6.0  # bytes an element: an update without moments; of any, its pass for the norm
_BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "float8": 8, "float4": 4}


@dataclass(frozen=True)
class Target:
    """`arch` in sequences of `sequence` tokens on `cluster`; `values` are the constants of the model."""

    arch: Arch
    sequence: int
    precision: Precision
    cluster: Cluster
    values: Mapping[str, float] = field(default_factory=lambda: VALUES)
    num_moments: int = 2

    def __post_init__(self) -> None:
        if self.cluster.constants:
            object.__setattr__(self, "values", {**self.values, **self.cluster.constants})

    @property
    def direct(self) -> bool:
        """Whether gathers and scatters go point to point, as they do on gloo, instead of round a ring."""
        return self.cluster.device.is_cpu

    @property
    def shapes(self) -> Shapes:
        return shapes(self.arch, self.sequence)

    @property
    def stored(self) -> int:
        """Bytes of a parameter or an activation: 8-bit products read 16-bit tensors."""
        return max(2, self.precision.compute.num_bytes)

    @property
    def state_bytes(self) -> int:
        """Bytes an element of moments and master copies."""
        return self.precision.master.num_bytes * (self.num_moments + self.precision.has_master)

    @property
    def low_precision(self) -> bool:
        """Whether products of blocks cast their operands first."""
        return _BITS[self._products] < 16

    @property
    def _products(self) -> str:
        return self.cluster.software.products or self.precision.compute.value

    @property
    def product_rate(self) -> float:
        """FLOP/s of large products of blocks."""
        return self._rate(self._products)

    @property
    def wide_rate(self) -> float:
        """FLOP/s of large products that stay in 16 bits: head, router, attention."""
        return self._rate("bfloat16" if self.low_precision else self._products)

    @property
    def peak_flops(self) -> float | None:
        """The peak for the products of blocks, of a data sheet or as it was measured; None where it is a guess."""
        source = self.cluster.sources.get("device.matrix_flops", "")
        return None if source.startswith("guess") else self._peak(self._products)[1]

    @property
    def attention_peak(self) -> float:
        """Peak FLOP/s of fused attention before its own share."""
        dtype = "bfloat16" if self.low_precision else self._products
        return self._peak(dtype)[1] * self._clock

    @property
    def attention_share(self) -> float:
        """Achieved share of fused attention's kernel on this device; the nearest older kernel where it has none."""
        device = self.cluster.device
        order = list(Attention)
        for kernel in reversed(order[1 : order.index(self.cluster.software.attention) + 1]):
            share = self.values.get(f"attention.{device.generation}.{kernel.value}")
            if share is not None:
                return share
        return 0.3

    @property
    def is_literal(self) -> bool:
        """Whether this project's own program is priced."""
        return self.cluster.software.following is Following.LITERAL

    @property
    def literal(self) -> Target:
        """The same for this project's own program."""
        software = replace(self.cluster.software, following=Following.LITERAL)
        return replace(self, cluster=replace(self.cluster, software=software))

    @property
    def unfused(self) -> bool:
        return self.cluster.software.attention is Attention.UNFUSED

    @property
    def fused_loss(self) -> bool:
        """Whether the loss works in place."""
        software = self.cluster.software
        auto = software.attention in (Attention.TRITON, Attention.FLASH3)
        return software.loss is Loss.FUSED or (software.loss is Loss.AUTO and auto)

    @property
    def eager(self) -> bool:
        return self.cluster.software.elementwise is Elementwise.EAGER

    @property
    def legacy(self) -> bool:
        return self.cluster.software.host is Host.LEGACY

    @property
    def memory_rate(self) -> float:
        """Bytes a second of streaming kernels."""
        device = self.cluster.device
        return device.memory_bytes_per_s * (device.memory_share or self.values["memory.share"])

    def update_seconds(self, owned: Array | float, whole: Array | float) -> Array:
        """Of `owned` elements, after a pass over the `whole` gradients that a rank has: bytes through memory."""
        each = self.values["optimizer.bytes"] if self.num_moments else _PLAIN_UPDATE
        return np.asarray((owned * (each - _GRADIENT_PASS) + whole * _GRADIENT_PASS) / self.memory_rate)

    @property
    def predicted(self) -> int:
        """Further tokens predicted in training, each a block and a head on the last stage (arXiv:2412.19437, 2.2)."""
        asked = self.cluster.software.predicted
        return (self.arch.family == Family.DEEPSEEK_V3) if asked < 0 else asked

    @property
    def captured(self) -> bool:
        """Whether the stack captures blocks with experts in graphs and runs their exchanges beside other work."""
        software = self.cluster.software
        return software.grace and (not software.release or year_month(software.release) >= (26, 6))

    def host_seconds(self, routed: bool) -> float:
        """Seconds the host needs to launch a block, forward and backward."""
        software, values = self.cluster.software, self.values
        if routed:
            seconds = values["host.experts"] * (values["host.grace"] if software.grace else 1.0)
            return seconds * (values["host.graphs"] if self.captured else 1.0)
        if self.eager:
            return values["host.eager"]
        return values["host.legacy" if self.legacy else "host.fused"]

    def _rate(self, dtype: str) -> float:
        device = self.cluster.device
        name, peak = self._peak(dtype)
        training = self.values.get(f"matrix.{device.generation}.{_BITS[name]}", 1.0)
        return peak * device.matrix_share.get(name, 0.75) * training * self._clock

    @property
    def _clock(self) -> float:
        """Sustained share of the clock of the stated peaks."""
        return float(self.cluster.device.power_share ** self.values["clock.power"])

    def _peak(self, dtype: str) -> tuple[str, float]:
        """The dtype on the data sheet that `dtype` runs as, and its peak."""
        peaks = self.cluster.device.matrix_flops
        same = {"float16": "bfloat16", "bfloat16": "float16", "float4": "float8", "float64": "float32"}
        for name in (dtype, same.get(dtype, dtype)):
            if name in peaks:
                return name, peaks[name]
        raise RequestError(
            f'precision.compute = "{dtype}"',
            f"cluster.device.matrix_flops of {self.cluster.device.name} has no such rate",
            [f"precision.compute = {known}" for known in peaks],
        )


def target_of(plan: Plan, cluster: Cluster, values: Mapping[str, float] = VALUES) -> Target:
    """What a plan is priced for."""
    moments = plan.optimizer.num_moments
    return Target(plan.arch, plan.data.sequence_length, plan.precision, cluster, values, moments)


def precision(compute: Dtype, reduce: Dtype = Dtype.FLOAT32, master: Dtype = Dtype.FLOAT32) -> Precision:
    """Types by name, for callers without a plan."""
    return Precision(compute, reduce, master)
