"""The plan: every decision of one run, and nothing that follows from them.

A plan is frozen, small at any number of ranks, and the only thing that is executed and priced. What can be computed
(stages' units, buckets, pieces, the program) is a cached pure function of it. Two plans that run alike are equal: a
field that decides nothing in a layout has one canonical value there, and `check_plan` refuses any other.

`math` hashes what decides the loss curve, `layout` the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from meshwright.arch.arch import Arch
from meshwright.config.choices import (
    Balance,
    Context,
    Documents,
    Dtype,
    LearningRateSchedule,
    Offload,
    OptimizerKind,
    Order,
    Recompute,
    Schedule,
    Statistic,
    TokenDtype,
    Weights,
)
from meshwright.config.counted import counted
from meshwright.config.errors import RequestError
from meshwright.layout.axes import Degrees
from meshwright.plan.hash import digest


@dataclass(frozen=True, slots=True)
class Start:
    """Where the start values come from; `folder` is read only by LOAD."""

    source: Weights = Weights.RANDOM
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Data:
    """What the samples of a step are. Sizes in tokens; `source` is a path or "python"."""

    source: str = "python"
    text_field: str = "text"
    dtype: TokenDtype = TokenDtype.UINT16
    tokenizer: str = "bytes"
    sequence_length: int = 256
    order: Order = Order.SHUFFLED
    documents: Documents = Documents.PACKED
    eval_fraction: float = 0.01


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of an optimizer step over all ranks, and of one forward pass on one rank."""

    sequences: int
    micro: int


@dataclass(frozen=True, slots=True)
class Sharding:
    """ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) and the cut of gradients into buckets.

    `within` 0 shards over all replicas; k shards inside groups of k and copies across. `bucket_bytes` 0: one a unit.
    """

    stage: int = 0
    within: int = 0
    reshard_after_forward: bool = True
    bucket_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`stages` counts the blocks of each virtual stage, in order of execution: pp * chunks numbers."""

    schedule: Schedule = Schedule.ONE_F_ONE_B
    chunks: int = 1
    stages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """How attention crosses the context axis; `inner` ranks exchange heads, the rest form a ring."""

    kind: Context = Context.RING
    inner: int = 1

    def __str__(self) -> str:
        """ "ring over ulysses groups of 2"."""
        return f"{self.kind}" + (f" over ulysses groups of {self.inner}" if self.inner > 1 else "")


@dataclass(frozen=True, slots=True)
class Execution:
    """How a unit is run: what is recomputed, what is kept elsewhere, what is compiled."""

    recompute: Recompute = Recompute.NONE
    offload: Offload = Offload.NONE
    offload_to: str = "memory"
    compile: bool = False
    sequence: bool = False  # sequence parallel
    asynchronous_tensor: bool = False


@dataclass(frozen=True, slots=True)
class Precision:
    """compute: parameters and activations; reduce: gradients and their sums; master: the optimizer's copy."""

    compute: Dtype = Dtype.FLOAT32
    reduce: Dtype = Dtype.FLOAT32
    master: Dtype = Dtype.FLOAT32

    @property
    def has_master(self) -> bool:
        """Whether the optimizer keeps a copy of its own."""
        return self.compute is not self.master

    @property
    def sent_bytes(self) -> int:
        """Of an element that ranks send each other; products of 8 bits round what they read where they are computed."""
        return max(2, self.compute.num_bytes)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Updates, and the course of the learning rate over `steps` optimizer steps (0: the course does not use them)."""

    kind: OptimizerKind = OptimizerKind.ADAMW
    learning_rate: float = 3e-3
    schedule: LearningRateSchedule = LearningRateSchedule.COSINE
    warmup_steps: int = 10
    min_learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    steps: int = 250

    @property
    def num_moments(self) -> int:
        """Tensors that it keeps an element. Raises RequestError where that is not decided."""
        match self.kind:
            case OptimizerKind.ADAMW:
                return 2
            case OptimizerKind.SGD:
                return 0
            case OptimizerKind.MUON:
                works = ('optimizer.kind = "adamw"', 'optimizer.kind = "sgd"')
                rule = "has no price: its cut by whole matrices is not built yet"
                raise RequestError('optimizer.kind = "muon"', rule, works)


@dataclass(frozen=True, slots=True)
class Moe:
    """How the load of experts is kept even; a model without experts has these values."""

    balance: Balance = Balance.NONE
    auxiliary_loss: float = 0.0
    z_loss: float = 0.0
    statistic: Statistic = Statistic.SEQUENCE
    capacity: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    seed: int
    arch: Arch
    start: Start
    data: Data
    batch: Batch
    optimizer: Optimizer
    precision: Precision
    degrees: Degrees
    sharding: Sharding
    pipeline: Pipeline
    context: ContextSplit
    execution: Execution
    moe: Moe = Moe()

    @property
    def accumulation(self) -> int:
        """Micro-batches a step on each batch rank."""
        return self.batch.sequences // (self.batch.micro * self.degrees.dp * self.degrees.ep)

    @property
    def math(self) -> str:
        """Hash of what decides the loss curve; equal plans may continue one another on any layout."""
        data = replace(self.data, source="", tokenizer="bytes" if self.data.tokenizer == "bytes" else "file")
        routed = () if self.moe == Moe() else (self.moe,)
        return digest(
            self.seed, self.arch, self.start.source, data, self.batch.sequences, self.optimizer, self.precision, *routed
        )

    @property
    def layout(self) -> str:
        """Hash of everything else that changes what ranks do."""
        return digest(self.batch.micro, self.degrees, self.sharding, self.pipeline, self.context, self.execution)

    @property
    def hash(self) -> str:
        """What names the plan in files: both hashes."""
        return f"{self.math}-{self.layout}"

    def __str__(self) -> str:
        """What was decided, a line a subject; `meshwright explain` tells what follows from it."""
        replicas = counted(self.degrees.dp * self.degrees.ep, "replica")
        batch = f"{counted(self.batch.sequences, 'sequence')} of {self.data.sequence_length} tokens a step: "
        batch += f"{counted(self.accumulation, 'micro-batch')} of {self.batch.micro} on each of {replicas}"
        parts = ["sharding", "pipeline", "execution", "precision"] + ["moe"] * (self.arch.experts is not None)
        context = f", {self.context}" if self.degrees.cp > 1 else ""
        lines = {
            "plan": f"{self.name}, math {self.math}, layout {self.layout}",
            "model": f"{self.arch.family}, {self.arch.layers} layers of {self.arch.hidden}, {self.arch.vocab} tokens",
            "batch": batch,
            "mesh": f"{counted(self.degrees.ranks, 'rank')}: {self.degrees}{context}",
            **{part: _fields(getattr(self, part)) for part in parts},
        }
        return "\n".join(f"{name:<10}{text}" for name, text in lines.items())


def _fields(part: Any) -> str:
    return ", ".join(f"{each.name} {_text(getattr(part, each.name))}" for each in fields(part))


def _text(value: object) -> str:
    return "yes" if value is True else "no" if value is False else str(value)
