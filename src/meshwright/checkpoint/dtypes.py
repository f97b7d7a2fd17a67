"""Number formats by the names that manifests and safetensors files give them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

__all__ = ["CODES", "NAMES", "code_of", "name_of"]

NAMES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float64": torch.float64,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "int64": torch.int64,
        "int32": torch.int32,
    }
)
"""In manifests."""

CODES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }
)
"""In safetensors headers."""


def name_of(dtype: torch.dtype) -> str:
    return next(name for name, known in NAMES.items() if known is dtype)


def code_of(dtype: torch.dtype) -> str:
    return next(code for code, known in CODES.items() if known is dtype)
