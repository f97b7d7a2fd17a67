"""A mesh that cannot be is refused where it is named, before any rank waits for another."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.comm.mesh import Mesh


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"cp": 0}, "cp = 0: a degree must be an integer, at least 1"),
        ({"ep": 2.5}, "ep = 2.5: a degree must be an integer, at least 1"),
        ({"cp": 4, "ulysses": 3}, "cp = 4 cannot be cut into groups of 3"),
        ({"dp": 2, "ep": 2, "shard_within": 3}, "dp x ep x cp = 4 cannot be cut into groups of 3"),
        ({"tp": 4, "kv_copies": 3}, "tp = 4 cannot be cut into groups of 3"),
        ({"order": ["pp", "dp", "ep", "cp", "xp"]}, "order names 'xp': the axes are pp, dp, ep, cp, tp"),
    ],
)
def test_refused_by_name(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Mesh(**asked)
