"""The planner's first choice in the small, run dry: where memory is scarce it is what decides, and is kept to.

Published runs likewise: tests/prove/test_first_choices.py.
"""

from __future__ import annotations

import pytest

from tests.prove.first_choices import check, first_choice

MODEL = ("model.family=llama", "model.layers=8", "model.hidden=1024", "model.heads=16", "model.kv_heads=4",
         "model.ffn=2816", "model.vocab=32000", "data.sequence_length=1024", "batch.global=32",
         "precision.compute=bfloat16")  # fmt: skip


@pytest.mark.parametrize("following", ["usual", pytest.param("literal", marks=pytest.mark.prove)])
def test_a_scarce_device_gets_a_layout_that_stays_in_it(following: str) -> None:
    """119 million parameters on 8 devices of 2.2 GB: the fastest layouts of all do not fit."""
    roomy = first_choice("h100-sxm", 8, [*MODEL, f"cluster.software.following={following}"])
    assert roomy.trained_peak is not None
    scarce = f"cluster.device.memory_bytes={2.2e9:.0f}"
    price = first_choice("h100-sxm", 8, [*MODEL, f"cluster.software.following={following}", scarce])
    assert roomy.trained_peak > 2.2e9 > price.trained_peak  # type: ignore[operator]
    assert price.step_seconds >= roomy.step_seconds
    check(price)
