"""The one place where a plan's number formats become torch's."""

from __future__ import annotations

import torch

from meshwright.config.choices import Dtype

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    Dtype.FLOAT64: torch.float64,
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
}
