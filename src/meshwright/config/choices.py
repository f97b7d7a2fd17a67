"""Every choice a run file offers, as an enum. Imports nothing, so that any package may use it."""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "AxisName",
    "Balance",
    "Balanced",
    "Context",
    "DeviceKind",
    "Documents",
    "Dtype",
    "Family",
    "Fill",
    "LearningRateSchedule",
    "Offload",
    "OnLoss",
    "OnNonfinite",
    "OptimizerKind",
    "Order",
    "Recompute",
    "Resume",
    "RopeKind",
    "Schedule",
    "Statistic",
    "TokenDtype",
    "Weights",
]


class Family(StrEnum):
    """Architecture families, by the names their ``config.json`` files use as ``model_type``."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    GPT2 = "gpt2"
    BLOOM = "bloom"
    MIXTRAL = "mixtral"
    QWEN3_MOE = "qwen3_moe"
    DEEPSEEK_V3 = "deepseek_v3"


class RopeKind(StrEnum):
    """How rotary frequencies are stretched beyond the context a model was trained for."""

    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


class Weights(StrEnum):
    """Where the first weights come from: counter-based numbers, or the files of an ``hf`` folder."""

    RANDOM = "random"
    LOAD = "load"


class TokenDtype(StrEnum):
    """The integer type of raw token files."""

    UINT16 = "uint16"
    UINT32 = "uint32"


class Order(StrEnum):
    """The order in which samples are taken: seeded and reshuffled each epoch, or as they lie in the files."""

    SHUFFLED = "shuffled"
    SEQUENTIAL = "sequential"


class Documents(StrEnum):
    """Whether a token may attend across document borders (packed) or sees its own document only (masked)."""

    PACKED = "packed"
    MASKED = "masked"


class AxisName(StrEnum):
    """The five axes of the mesh, in the default order, outermost first."""

    PP = "pp"
    DP = "dp"
    EP = "ep"
    CP = "cp"
    TP = "tp"


class Fill(StrEnum):
    """A data-parallel degree that is whatever the number of ranks leaves."""

    FILL = "fill"


class Schedule(StrEnum):
    """Pipeline schedules."""

    NAIVE = "naive"
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_V = "zb-v"

    @property
    def is_split(self) -> bool:
        """Whether the products for weight gradients are put off to where a stage would wait."""
        return self in (Schedule.ZB_H1, Schedule.ZB_V)


class Balanced(StrEnum):
    """Pipeline stages cut so that the largest is smallest, instead of a list of layer counts."""

    BALANCED = "balanced"


class Context(StrEnum):
    """How attention crosses the context axis."""

    RING = "ring"
    ALLGATHER = "allgather"
    ULYSSES = "ulysses"


class Recompute(StrEnum):
    """What the backward pass computes again instead of keeping it."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Offload(StrEnum):
    """What is kept outside device memory between its uses."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMS = "params"


class Balance(StrEnum):
    """How the load of the experts is kept even."""

    AUXILIARY = "auxiliary"
    BIAS = "bias"
    NONE = "none"


class Statistic(StrEnum):
    """Over what router statistics are taken: each sequence, or the global batch one step late."""

    SEQUENCE = "sequence"
    LAGGED = "lagged"


class OptimizerKind(StrEnum):
    """Optimizers."""

    ADAMW = "adamw"
    SGD = "sgd"
    MUON = "muon"


class LearningRateSchedule(StrEnum):
    """The shape of the learning rate after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Dtype(StrEnum):
    """Floating-point types, widest first."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8 = "float8"

    @property
    def num_bytes(self) -> int:
        """Bytes an element takes."""
        return _NUM_BYTES[self]


_NUM_BYTES = {Dtype.FLOAT64: 8, Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2, Dtype.FLOAT16: 2, Dtype.FLOAT8: 1}


class DeviceKind(StrEnum):
    """Kinds of device; auto takes CUDA where there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Resume(StrEnum):
    """From where a run continues, unless a checkpoint folder is named."""

    AUTO = "auto"
    NONE = "none"


class OnLoss(StrEnum):
    """What happens when a rank is lost."""

    STOP = "stop"
    WAIT = "wait"
    SHRINK = "shrink"


class OnNonfinite(StrEnum):
    """What happens when a step's gradients are not finite."""

    STOP = "stop"
    SKIP = "skip"
    ROLLBACK = "rollback"
