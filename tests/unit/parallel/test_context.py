"""The core of attention is replaced once, and nothing else of a unit."""

from __future__ import annotations

import pytest
import torch

from meshwright.arch.arch import Arch
from meshwright.model import build_decoder
from meshwright.model.attention import attend
from meshwright.parallel.context import ContextAxis, apply_context


def test_a_second_application_is_an_error() -> None:
    arch = Arch("llama", layers=2, hidden=8, heads=2, kv_heads=2, head_dim=4, ffn=16, vocab=5)
    model, axis = build_decoder(arch, dtype=torch.float32, device="meta"), ContextAxis(ring="ring")
    assert all(block.attention.core is attend for block in model.layers)
    apply_context(model.units, axis)
    assert all(block.attention.core == axis.core for block in model.layers)
    with pytest.raises(ValueError, match="replaced already"):
        apply_context(model.units, axis)
