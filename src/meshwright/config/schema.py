"""The run file: what a user may ask for, with every key, its default and the rules that need no model.

Each table is a frozen section; a component receives its own section and nothing else. Keys, defaults and meanings are
the public contract: a test compares them with the documented run file.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, Strict, field_validator, model_validator

from meshwright.config.choices import (
    AxisName,
    Balance,
    Balanced,
    Context,
    DeviceKind,
    Documents,
    Dtype,
    Fill,
    LearningRateSchedule,
    Offload,
    OnLoss,
    OnNonfinite,
    OptimizerKind,
    Order,
    Recompute,
    Resume,
    Schedule,
    Statistic,
    TokenDtype,
)
from meshwright.config.errors import RequestError
from meshwright.config.model_section import ModelConfig, RopeScaling
from meshwright.config.values import (
    INTEGER_MAX,
    Count,
    Fraction,
    NonNegative,
    Number,
    Positive,
    PositiveNumber,
    Section,
    Switch,
    Text,
)

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "DataConfig",
    "MeshConfig",
    "ModelConfig",
    "MoeConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RopeScaling",
    "RunConfig",
    "SurviveConfig",
    "TrackConfig",
    "TrainConfig",
]


class DataConfig(Section):
    """What is read, and how it becomes samples."""

    source: Text = "python"
    """"python" (this interpreter's own library sources), or a path or glob of text or token files."""
    text_field: Text = "text"
    """The field of .jsonl and .parquet records that holds the text."""
    dtype: TokenDtype = TokenDtype.UINT16
    """Integer type of raw .bin token files."""
    tokenizer: Text = "bytes"
    """"bytes" (257 tokens, 256 ends a document), or a tokenizer.json, or a folder that holds one."""
    sequence_length: Positive = 256
    """Tokens of a sample."""
    order: Order = Order.SHUFFLED
    """shuffled, or sequential: samples in file order."""
    documents: Documents = Documents.PACKED
    """packed: attention across documents; masked: each token sees its own document only."""
    eval_fraction: Fraction = 0.01
    """Share of the data, last in file order, that is kept for evaluation; 0: none."""


class MeshConfig(Section):
    """Degrees of the five axes, and which axis lies nearest to which link."""

    dp: Positive | Fill = 2
    """Data-parallel degree, or "fill": what the number of ranks leaves."""
    tp: Positive = 1
    """Tensor-parallel degree."""
    pp: Positive = 1
    """Pipeline stages."""
    cp: Positive = 1
    """Context-parallel degree."""
    ep: Positive = 1
    """Expert-parallel degree; its ranks read different data."""
    order: tuple[AxisName, ...] = tuple(AxisName)
    """The five axes, outermost first."""

    @field_validator("order")
    @classmethod
    def _check_order(cls, order: tuple[AxisName, ...]) -> tuple[AxisName, ...]:
        if sorted(order) != sorted(AxisName):
            given = ", ".join(f'"{axis}"' for axis in order)
            default = ", ".join(f'"{axis}"' for axis in AxisName)
            raise RequestError(f"mesh.order = [{given}]", "must name each of the five axes once", (f"[{default}]",))
        return order


_CHUNKS_RULE = "interleaved takes chunks of at least 2, zb-v exactly 2, every other schedule 1"


class ParallelConfig(Section):
    """How each axis is used."""

    zero: Annotated[int, Strict(), Field(ge=0, le=3)] = 0
    """ZeRO stage: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters sharded."""
    zero_shard_within: NonNegative = 0
    """0: shard over all replicas; k: inside groups of k, replicated across."""
    reshard_after_forward: Switch = True
    """Stage 3: false keeps gathered parameters until backward."""
    bucket_bytes: NonNegative = 0
    """Size of a gradient bucket; 0: one bucket a block."""
    sequence: Switch = True
    """Sequence parallel with tp."""
    asynchronous_tensor: Switch = False
    """Tensor collectives in chunks under the products (CUDA)."""
    schedule: Schedule = Schedule.ONE_F_ONE_B
    """Pipeline schedule."""
    chunks: Positive = 1
    """Model chunks a stage: interleaved at least 2, zb-v 2, all others 1."""
    stages: Balanced | Annotated[tuple[Positive, ...], Field(min_length=1)] = Balanced.BALANCED
    """"balanced", or a list of layer counts."""
    context: Context = Context.RING
    """How attention crosses the context axis."""
    context_inner: Positive = 1
    """k > 1 with ring: ulysses inside groups of k, ring across."""
    recompute: Recompute = Recompute.NONE
    """What backward computes again instead of keeping it."""
    offload: Offload = Offload.NONE
    """What lives outside device memory between its uses."""
    offload_to: Text = "memory"
    """"memory", or a folder."""
    compile: Switch = False
    """Compile each unit."""

    @model_validator(mode="after")
    def _check_chunks(self) -> Self:
        fits = {Schedule.INTERLEAVED: self.chunks >= 2, Schedule.ZB_V: self.chunks == 2}
        if not fits.get(self.schedule, self.chunks == 1):
            chunks = 2 if self.schedule in fits else 1
            other = {1: Schedule.ONE_F_ONE_B}.get(self.chunks, Schedule.INTERLEAVED)
            raise RequestError(
                f'parallel.chunks = {self.chunks} with parallel.schedule = "{self.schedule}"',
                _CHUNKS_RULE,
                (f"parallel.chunks = {chunks}", f'parallel.schedule = "{other}"'),
            )
        return self

    @model_validator(mode="after")
    def _check_context(self) -> Self:
        if self.context_inner > 1 and self.context is not Context.RING:
            raise RequestError(
                f'parallel.context_inner = {self.context_inner} with parallel.context = "{self.context}"',
                "only the ring has an inner group",
                ("parallel.context_inner = 1", 'parallel.context = "ring"'),
            )
        return self


class MoeConfig(Section):
    """Routing of models with experts."""

    balance: Balance = Balance.AUXILIARY
    """auxiliary (a loss with coefficient auxiliary_loss), bias, or none."""
    auxiliary_loss: Number = 0.01
    """Coefficient of the balance loss."""
    z_loss: Number = 0.0
    """Coefficient of the router's z-loss."""
    statistic: Statistic = Statistic.SEQUENCE
    """sequence, or lagged: the global batch, one step late."""
    capacity: Number = 0.0
    """Tokens an expert takes, as a multiple of an even share; 0: nothing dropped."""


class BatchConfig(Section):
    """How many sequences."""

    global_: Positive = Field(default=16, alias="global")
    """Sequences an optimizer step."""
    micro: Positive = 4
    """Sequences a forward pass on one rank."""


class OptimizerConfig(Section):
    """The update, and the learning rate over optimizer steps."""

    kind: OptimizerKind = OptimizerKind.ADAMW
    """adamw, or sgd: plain, without momentum and decay."""
    learning_rate: Number = 3e-3
    """The peak."""
    schedule: LearningRateSchedule = LearningRateSchedule.COSINE
    """Shape after warm-up."""
    warmup_steps: NonNegative = 10
    """Steps over which the learning rate rises."""
    min_learning_rate: Number = 3e-4
    """Where linear and cosine end."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    eps: Number = 1e-8
    """AdamW's epsilon."""
    weight_decay: Number = Field(default=0.1, description="Decoupled decay of tensors of two or more dims; sgd: 0.")
    clip_norm: Number = 1.0
    """Largest norm of the whole gradient; 0: off."""

    @model_validator(mode="before")
    @classmethod
    def _default_decay(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("kind") == OptimizerKind.SGD:
            return {"weight_decay": 0.0, **data}
        return data

    @model_validator(mode="after")
    def _check_decay(self) -> Self:
        if self.kind is OptimizerKind.SGD and self.weight_decay != 0:
            raise RequestError(
                f'optimizer.weight_decay = {self.weight_decay} with optimizer.kind = "sgd"',
                "sgd is plain: it has no decay",
                ("optimizer.weight_decay = 0", 'optimizer.kind = "adamw"'),
            )
        return self

    @model_validator(mode="after")
    def _check_floor(self) -> Self:
        falls = self.schedule is not LearningRateSchedule.CONSTANT
        if falls and self.min_learning_rate > self.learning_rate:
            raise RequestError(
                f"optimizer.min_learning_rate = {self.min_learning_rate}",
                f"must not exceed optimizer.learning_rate = {self.learning_rate}",
                (f"optimizer.min_learning_rate = {self.learning_rate / 10:.6g}", 'optimizer.schedule = "constant"'),
            )
        return self


class PrecisionConfig(Section):
    """Types of the forward and backward pass, of gradient sums, and of the optimizer's copy."""

    compute: Dtype = Dtype.FLOAT32
    """Type of parameters and activations; float64 sets all three."""
    reduce: Dtype = Dtype.FLOAT32
    """Type of gradients and their sums."""
    master: Dtype = Dtype.FLOAT32
    """Type of the optimizer's copy; where it equals compute there is no copy."""

    @model_validator(mode="before")
    @classmethod
    def _default_double(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("compute") == Dtype.FLOAT64:
            return {"reduce": Dtype.FLOAT64, "master": Dtype.FLOAT64, **data}
        return data

    @model_validator(mode="after")
    def _check_types(self) -> Self:
        compute = f'with precision.compute = "{self.compute}"'
        for key, dtype in (("reduce", self.reduce), ("master", self.master)):
            value = f'precision.{key} = "{dtype}"'
            if self.compute is Dtype.FLOAT64 and dtype is not Dtype.FLOAT64:
                raise RequestError(f"{value} {compute}", "float64 is for all three", (f'precision.{key} = "float64"',))
            if dtype is Dtype.FLOAT8:
                raise RequestError(value, "float8 is a type of products only", (f'precision.{key} = "float32"',))
        if self.master is not self.compute and self.master.num_bytes <= self.compute.num_bytes:
            raise RequestError(
                f'precision.master = "{self.master}" {compute}',
                "the optimizer's copy must be wider than what it is a copy of",
                (f'"{self.compute}"', *(f'"{d}"' for d in Dtype if d.num_bytes > max(2, self.compute.num_bytes))),
            )
        return self


class TrainConfig(Section):
    """How long, how often, where."""

    steps: Positive | None = Field(default=None, json_schema_extra={"default": 250})
    """Optimizer steps; 250 where tokens is not given."""
    tokens: Count | None = None
    """Input tokens to train on, instead of steps; may be written 1e9."""
    eval_every: NonNegative = 50
    """Steps between evaluations; 0: none."""
    log_every: Positive = 1
    """Steps between lines of the log."""
    output: Text = "runs"
    """Folder of run folders."""
    device: DeviceKind = DeviceKind.AUTO
    """auto, cpu or cuda."""

    @model_validator(mode="before")
    @classmethod
    def _default_steps(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("steps") is None and data.get("tokens") is None:
            return {**data, "steps": 250}
        return data

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.steps is not None and self.tokens is not None:
            raise RequestError(
                f"train.tokens = {self.tokens}",
                f"cannot stand beside train.steps = {self.steps}: one of them says how long a run is",
                ("train.steps alone", "train.tokens alone"),
            )
        return self


class CheckpointConfig(Section):
    """When state is saved, and from where a run continues."""

    every: NonNegative = 0
    """Steps between checkpoints; 0: only at the end."""
    keep: Positive = 2
    """Checkpoints that stay."""
    asynchronous: Switch = True
    """The step waits only for the copy to host memory."""
    resume: Annotated[Resume | Text, Field(union_mode="left_to_right")] = Resume.AUTO
    """auto, none, or a checkpoint folder."""
    accept_changes: Switch = False
    """Continue although what decides the loss curve was changed."""


class SurviveConfig(Section):
    """What happens when something fails."""

    heartbeat_seconds: PositiveNumber = 60.0
    """A rank silent for longer is named and ended."""
    restarts: NonNegative = 3
    """How often a run is started again."""
    on_loss: OnLoss = OnLoss.STOP
    """A rank is lost: stop, wait or shrink."""
    on_nonfinite: OnNonfinite = OnNonfinite.STOP
    """A gradient is not finite: stop, skip or rollback."""


class TrackConfig(Section):
    """What is checked and told while training."""

    strict: Switch = False
    """Fail when a predicted ledger differs from the measured one."""
    tensorboard: Switch = False
    """Write TensorBoard events."""
    wandb: Switch = False
    """Report to Weights & Biases."""


class RunConfig(Section):
    """A whole run, resolved: every choice is made except those a preset or an hf folder makes for the model."""

    name: Text = "demo"
    """Name of the run folder."""
    seed: Annotated[int, Strict(), Field(ge=0, le=INTEGER_MAX)] = 0
    """Seed of weights, order and dropout."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    parallel: ParallelConfig = ParallelConfig()
    moe: MoeConfig = MoeConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    survive: SurviveConfig = SurviveConfig()
    track: TrackConfig = TrackConfig()

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name in {".", ".."} or any(mark in name for mark in "/\\\0\n\r") or len(name.encode()) > 200:
            safe = "".join("-" if mark in "/\\\0\n\r" else mark for mark in name).strip(".")[:50]
            raise RequestError(f"name = {name!r}", "must be the name of one folder", (f'"{safe or "demo"}"',))
        return name

    def tables(self) -> dict[str, Any]:
        """Return the run as plain tables, as a run file holds them: unset keys left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
