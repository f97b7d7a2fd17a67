"""Experts on several ranks equal one float64 process, to 1e-12: alone and with every other axis and feature."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwright.config.choices import Offload, Recompute, Schedule
from meshwright.plan.plan import Moe
from meshwright.verify.ladder import Rung
from tests.ranks.verify.parity import FEW
from tests.ranks.verify.test_experts import BIAS, FULL, SHARED, TERMS, check, rung

HOST, HALF = Offload.OPTIMIZER, Recompute.SELECTIVE
PIPES = (
    {"schedule": Schedule.NAIVE},
    {"schedule": Schedule.GPIPE, "zero": 1, "recompute": FULL},
    {"schedule": Schedule.ONE_F_ONE_B, "zero": 3},
    {"schedule": Schedule.ZB_H1, "zero": 2, "offload": HOST},
    {"schedule": Schedule.INTERLEAVED, "chunks": 2, "zero": 2, "recompute": FULL},
    {"schedule": Schedule.ZB_V, "chunks": 2, "zero": 3},
)


def few_layers(moe: Moe) -> Sequence[Rung]:
    return (
        rung(moe, ep=2),
        rung(moe, ep=4, micro=1, zero=1, offload=HOST),
        rung(moe, ep=4, micro=1, zero=3, within=2, recompute=FULL),
        rung(moe, ep=2, dp=2, micro=1),
        rung(moe, ep=2, dp=2, micro=1, zero=1, recompute=FULL),
        rung(moe, ep=2, dp=2, micro=1, zero=2, offload=HOST),
        rung(moe, ep=2, dp=2, micro=3, zero=3, within=2),
        rung(moe, ep=2, cp=2),
        rung(moe, ep=2, cp=2, zero=3, within=2, recompute=FULL),
        rung(moe, cp=2, dp=2, micro=1, zero=2),
        rung(moe, ep=2, tp=2),
        rung(moe, ep=2, tp=2, sequence=True, zero=3),
        rung(moe, ep=2, tp=2, sequence=True, zero=2, recompute=FULL),
        rung(moe, ep=2, cp=2, recompute=HALF),
        rung(moe, ep=2, tp=2, recompute=HALF),
        rung(moe, ep=2, tp=2, sequence=True, zero=3, recompute=HALF),
    )


def pipes(moe: Moe) -> Sequence[Rung]:
    four: dict[str, Any] = {"layers": 4, "pp": 2, "ep": 2}
    return [rung(moe, **four, **each) for each in PIPES]


def many_ranks(moe: Moe) -> Sequence[Rung]:
    """Three axes at once, on eight ranks."""
    four: dict[str, Any] = {"layers": 4, "pp": 2, "ep": 2}
    return (
        rung(moe, **four, tp=2, sequence=True, schedule=Schedule.ZB_H1, zero=1),
        rung(moe, **four, dp=2, micro=1, schedule=Schedule.ONE_F_ONE_B, zero=3, within=2, recompute=FULL),
        rung(moe, **four, dp=2, micro=1, schedule=Schedule.ZB_V, chunks=2, zero=2),
        rung(moe, ep=2, cp=2, tp=2, sequence=True, zero=2),
    )


@pytest.mark.prove
@pytest.mark.timeout(170)
def test_experts_on_several_ranks(tmp_path: Path) -> None:
    rungs = {
        "terms": [few_layers(TERMS)[2], few_layers(TERMS)[10]],
        "bias": [few_layers(BIAS)[12], few_layers(BIAS)[15]],
        "terms, four layers": [pipes(TERMS)[5]],
        "shared": [rung(TERMS, experts=SHARED, ep=2, dp=2, micro=1, zero=2, offload=HOST)],
    }
    check(rungs, tmp_path, timeout=160, steps=FEW)


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moe", [TERMS, BIAS], ids=["terms", "bias"])
def test_experts_on_several_ranks_of_all_layouts(tmp_path: Path, moe: Moe) -> None:
    rungs = {
        "two layers": few_layers(moe),
        "four layers": pipes(moe),
        "shared": [
            rung(moe, experts=SHARED, ep=4, micro=1, zero=2),
            rung(moe, experts=SHARED, ep=2, tp=2, sequence=True, recompute=FULL),
            rung(moe, experts=SHARED, ep=2, pp=2, schedule=Schedule.ZB_H1, zero=1),
            rung(moe, experts=SHARED, ep=2, cp=2, zero=2),
        ],
    }
    check(rungs, tmp_path, timeout=580)


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moe", [TERMS, BIAS], ids=["terms", "bias"])
def test_experts_beside_two_more_axes(tmp_path: Path, moe: Moe) -> None:
    *pipelines, of_two_layers = many_ranks(moe)
    check({"four layers": pipelines, "two layers": [of_two_layers]}, tmp_path, timeout=580, ranks=8)
