"""Experts on several ranks equal one float64 process, to 1e-12: alone and with every other axis and feature."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.verify.test_experts import BIAS, TERMS, check, rung


@pytest.mark.timeout(170)
def test_experts_on_several_ranks(tmp_path: Path) -> None:
    rungs = {
        "terms": [rung(TERMS, ep=2), rung(TERMS, ep=4, micro=1), rung(TERMS, ep=2, tp=2)],
        "bias": [rung(BIAS, ep=2, dp=2, micro=1, zero=2)],
    }
    check(rungs, tmp_path, timeout=160)
