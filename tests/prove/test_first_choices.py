"""First choices of the planner, run dry: the real program of the first and the last stage, in the memory it was given.

Every tenth published run of a model that can run, and the runs of docs/pricing.md; as usual trainers are priced and as
this project's own program is;
8-bit products are replaced by 16-bit ones, and BLOOM's biases (ALiBi), which have no module, by positions of its size.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.price import REAL

from tests.prove.first_choices import check, first_choice
from tests.unit.price import published

_BLOOM = ("model.family=gpt2", "model.layers=70", "model.hidden=14336", "model.heads=112", "model.kv_heads=112",
          "model.ffn=57344", "model.vocab=250880", "model.max_positions=2048")  # fmt: skip


def requests() -> Iterator[tuple[str, str, int, list[str]]]:
    """(name, cluster, devices, words)."""
    for name, cluster, words in REAL:
        gpus = 1
        for word in words:
            gpus *= int(word.partition("=")[2]) if word.startswith("mesh.") else 1
        kept = [word for word in words if word != "model.preset=bloom-176b"]
        yield name, cluster, gpus, [*kept, *(_BLOOM if len(kept) < len(words) else ())]
    timed = [row for row in published.rows() if row["measured"].get("iter_time_s")]
    for row in timed[::10]:
        asked = [word.replace("model.family=bloom", "model.family=gpt2") for word in published.words(row)]
        long = [f"model.max_positions={row['model']['seq']}"] if str(row["id"]).startswith("bloom") else []
        yield str(row["id"]), asked[1], int(asked[3]), [*asked[4:], *long]


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("following", ["usual", "literal"])
@pytest.mark.parametrize("asked", list(requests()), ids=lambda asked: asked[0])
def test_a_first_choice_stays_in_memory_when_run_dry(
    asked: tuple[str, str, int, list[str]], following: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, cluster, gpus, words = asked
    price = first_choice(cluster, gpus, [*words, f"cluster.software.following={following}"])
    told = check(price)
    with capsys.disabled():
        print(f"\n{name}, {following}: {told}")
