"""Every family and feature of a model equals one float64 process on every data-parallel layout, to 1e-12.

All with dropout 0.1: masks that depended on the layout would move every figure. Ragged labels (padding, prompts, holes,
sequences without a trained token) come with the ladder's batches, ragged documents where they are masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.arch.families import SHAPES, arch_from_fields, family_template
from meshwright.config.choices import Documents, Family
from meshwright.plan.rules import canonical
from meshwright.verify.ladder import Rung
from meshwright.verify.settings import DOUBLE, OPTIMIZERS, optimizer_of
from tests.ranks.verify.parity import check_all, climb, job
from tests.unit.plan.plans import make_plan

SEQUENCES, LENGTH = 16, 12
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 67, "dropout": 0.1}
STRETCHED = {"factor": 4.0, "original_max_positions": 8}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 2},
    "llama, masked documents": {"family": "llama", "kv_heads": 1, "documents": Documents.MASKED},
    "llama, linear scaling": {"family": "llama", "rope_scaling": {"kind": "linear", "factor": 4.0}},
    "llama, llama3 scaling": {
        "family": "llama",
        "kv_heads": 2,
        "rope_scaling": {"kind": "llama3", "low_frequency_factor": 1.0, "high_frequency_factor": 4.0, **STRETCHED},
    },
    "llama, yarn": {"family": "llama", "kv_heads": 2, "rope_scaling": {"kind": "yarn", **STRETCHED}},
    "mistral": {"family": "mistral", "kv_heads": 2, "sliding_window": 5},
    "mistral, masked documents": {"family": "mistral", "sliding_window": 5, "documents": Documents.MASKED},
    "qwen2": {"family": "qwen2", "kv_heads": 2, "documents": Documents.MASKED},
    "qwen3": {"family": "qwen3", "kv_heads": 2, "head_dim": 12},
    "mixtral": {"family": "mixtral", "kv_heads": 2, "experts": 4, "experts_per_token": 2, "sliding_window": 5},
    "qwen3_moe": {
        "family": "qwen3_moe",
        "kv_heads": 2,
        "experts": 6,
        "experts_per_token": 3,
        "expert_ffn": 16,
        "dense_layers": 1,
        "documents": Documents.MASKED,
    },
    "gpt2": {"family": "gpt2", "max_positions": LENGTH},
    "gpt2, masked documents": {"family": "gpt2", "max_positions": 16, "documents": Documents.MASKED},
}


def rung(variant: dict[str, Any], dp: int, micro: int, zero: int = 0) -> Rung:
    fields = SIZES | {key: value for key, value in variant.items() if key not in ("family", "documents")}
    arch = arch_from_fields(family_template(variant["family"]), fields)
    plan = make_plan(dp=dp, micro=micro, accumulation=SEQUENCES // (dp * micro), zero=zero)
    data = replace(plan.data, sequence_length=LENGTH, documents=variant.get("documents", Documents.PACKED))
    plan = replace(plan, arch=arch, data=data, precision=DOUBLE, optimizer=optimizer_of(OPTIMIZERS[0]))
    return Rung((f"dp {dp} x micro {micro}, zero {zero}",), canonical(plan))


def climb_variants(rungs: Mapping[str, Sequence[Rung]], folder: Path, timeout: float) -> None:
    jobs = [job(name.replace(" ", "-"), folder, each) for name, each in rungs.items()]
    check_all(jobs, climb(jobs, 4, timeout))


def test_every_family_that_runs_is_here() -> None:
    runs = {family.value for family in Family if family not in SHAPES}
    assert {variant["family"] for variant in VARIANTS.values()} == runs


def layouts() -> Iterator[tuple[int, int, int]]:
    """(dp, micro, zero), by turns."""
    while True:
        yield from ((2, 2, 0), (4, 1, 0), (2, 1, 3), (4, 2, 1))


@pytest.mark.timeout(170)
def test_families_on_some_layouts(tmp_path: Path) -> None:
    rungs = {
        name: [rung(variant, *layout)] for (name, variant), layout in zip(VARIANTS.items(), layouts(), strict=False)
    }
    climb_variants(rungs, tmp_path, timeout=160)


@pytest.mark.prove
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", VARIANTS)
def test_families_on_all_layouts(tmp_path: Path, name: str) -> None:
    grid = [(dp, micro, 0) for dp in (1, 2, 4) for micro in (1, 2, 4)] + [(4, 1, zero) for zero in (1, 2, 3)]
    climb_variants({name: [rung(VARIANTS[name], *layout) for layout in grid]}, tmp_path, timeout=380)
