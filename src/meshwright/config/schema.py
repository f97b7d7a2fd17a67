"""The run file: what a user may ask for, with every key, its default and the rules that need no model.

Each table is a frozen section; a component receives its own section and nothing else. Keys, defaults and meanings are
the public contract: a test compares them with the documented run file.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from meshwright.config.choices import OnLoss, OnNonfinite, Resume
from meshwright.config.errors import RequestError
from meshwright.config.model_section import ModelConfig, RopeScaling
from meshwright.config.parallel_section import MeshConfig, MoeConfig, ParallelConfig
from meshwright.config.training_section import BatchConfig, DataConfig, OptimizerConfig, PrecisionConfig, TrainConfig
from meshwright.config.values import NonNegative, Positive, PositiveNumber, Section, Switch, Text

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
    seed: NonNegative = 0
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
        if name.startswith(".") or any(mark in name for mark in "/\\\0\n\r") or len(name.encode()) > 200:
            safe = "".join("-" if mark in "/\\\0\n\r" else mark for mark in name).strip(".")[:50]
            rule = "must be the name of one folder that is not hidden"
            raise RequestError(f"name = {name!r}", rule, (f'"{safe or "demo"}"',))
        return name

    def tables(self) -> dict[str, Any]:
        """Return the run as plain tables, as a run file holds them: unset keys left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
