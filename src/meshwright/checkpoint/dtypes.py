"""Number formats by the names that manifests and safetensors files give them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from meshwright.checkpoint.errors import CheckpointError

__all__ = ["CODES", "NAMES", "code_of", "name_of"]

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
    """In manifests: as torch calls it."""
    return str(dtype).removeprefix("torch.")


NAMES: Mapping[str, torch.dtype] = MappingProxyType({name_of(dtype): dtype for dtype in CODES.values()})


def code_of(dtype: torch.dtype) -> str:
    """Raises CheckpointError for a type that the files have no word for."""
    for code, known in CODES.items():
        if known is dtype:
            return code
    raise CheckpointError(f"a tensor of {name_of(dtype)} cannot be saved; what works: {', '.join(NAMES)}")
