"""The ``[data]``, ``[batch]``, ``[optimizer]``, ``[precision]`` and ``[train]`` tables: what decides the loss curve."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from meshwright.config.choices import (
    DeviceKind,
    Documents,
    Dtype,
    LearningRateSchedule,
    OptimizerKind,
    Order,
    TokenDtype,
)
from meshwright.config.errors import RequestError
from meshwright.config.values import Count, Fraction, NonNegative, Number, Positive, Section, Text

__all__ = ["BatchConfig", "DataConfig", "OptimizerConfig", "PrecisionConfig", "TrainConfig"]


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
    """Folder of run folders; or an address such as s3://bucket/runs, for checkpoints: the rest stays in runs/<name>."""
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
