"""What a unit holds only while it runs."""

from __future__ import annotations

import pytest

from meshwright.arch.activations import Setting
from meshwright.arch.passing import Gradients, weight_passing
from meshwright.config.choices import Dtype
from tests.unit.plan.plans import make_plan

ARCH = make_plan(layers=2, arch={"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "vocab": 500}).arch
HEAD, BLOCK = ARCH.head_unit, 1


@pytest.mark.parametrize(("unit", "largest"), [(HEAD, 64 * 500), (BLOCK, 64 * 96)])
def test_a_product_that_is_added_to_another_dtype_stands_beside_it(unit: int, largest: int) -> None:
    """Measured: a pipeline's last stage, zb-h1 in bfloat16, held 3 % more than was foretold, which is the head's."""
    setting, own = Setting(2, 32), 10**6
    assert weight_passing(ARCH, unit, setting, Dtype.BFLOAT16, Gradients(True, 4, own)).after == 2 * largest
    assert weight_passing(ARCH, unit, setting, Dtype.FLOAT32, Gradients(True, 4, own)).after == 0
    assert weight_passing(ARCH, unit, setting, Dtype.BFLOAT16, Gradients(False, 4, own)).after == own
