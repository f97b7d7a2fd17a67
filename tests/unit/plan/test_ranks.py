"""A mesh on a number of ranks: refused where it is another, with what works there."""

from __future__ import annotations

import pytest

from meshwright.config.errors import RequestError
from meshwright.config.load import build_run
from meshwright.plan.resolve import resolve_degrees


@pytest.mark.parametrize(
    ("mesh", "ranks", "works"),
    [
        ({"dp": 1, "cp": 4}, 2, ("4 ranks",)),
        ({"dp": 1, "ep": 2}, 3, ("2 ranks",)),
        ({"dp": 3, "tp": 2}, 4, ("mesh.dp = 2", 'mesh.dp = "fill"')),
    ],
)
def test_what_is_offered_runs(mesh: dict[str, int], ranks: int, works: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as refused:
        resolve_degrees(build_run({"mesh": mesh}), ranks)
    assert refused.value.nearest == works
    for offer in works:
        if offer.endswith(" ranks"):
            assert resolve_degrees(build_run({"mesh": mesh}), int(offer.removesuffix(" ranks")))
        else:
            dp = offer.removeprefix("mesh.dp = ").strip('"')
            taken = build_run({"mesh": {**mesh, "dp": int(dp) if dp.isdigit() else dp}})
            assert resolve_degrees(taken, ranks).ranks == ranks
