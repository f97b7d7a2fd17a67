"""The planner's first choice for a request, and a dry run of its first and last stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.config.load import load_run
from meshwright.layout.axes import Coordinates
from meshwright.parallel.dry_run import dry_run
from meshwright.parallel.support import check_supported
from meshwright.plan.folds.traffic import Transport
from meshwright.price.catalogue import cluster_of
from meshwright.price.folded import steady
from meshwright.price.price import Price
from meshwright.price.search import search

_LEFT_TO_THE_SEARCH = ("mesh.", "parallel.", "batch.micro=", "cluster.software.products=", "cluster.software.share=")


@dataclass(frozen=True)
class Stage:
    """A dry run of a rank of one pipeline stage beside its price. Bytes."""

    predicted: int
    peak: int
    exact: bool
    """Whether traffic and states were as planned, to the byte."""


def first_choice(cluster: str, gpus: int, words: Sequence[str]) -> Price:
    """The planner's; keys of a layout among `words` are left to it, and types that do not run become bfloat16."""
    asked = [word for word in words if not word.startswith(_LEFT_TO_THE_SEARCH)]
    asked = ["precision.compute=bfloat16" if word == "precision.compute=float8" else word for word in asked]
    where = cluster_of(cluster, [word for word in asked if word.startswith("cluster.")])
    run = load_run(None, [word for word in asked if not word.startswith("cluster.")])
    return search(run, gpus, where, top=1, budget=30_000).best.price


def dried(price: Price) -> list[Stage]:
    """The first and the last stage, with as many micro-batches as fill the pipeline."""
    plan = steady(price.plan)
    check_supported(plan)
    out = []
    for place in sorted({0, plan.degrees.pp - 1}):
        done = dry_run(plan, plan.degrees.rank(Coordinates(pp=place)), transport=Transport.NCCL)
        exact = done.traffic_equal and done.states_equal
        out.append(Stage(done.expected.peak_bytes, done.timeline.peak_bytes, exact))
    return out


def check(price: Price) -> str:
    """Assert that the dry run stays in the device's memory, and near what the price says; tells by how much."""
    stages, room = dried(price), price.cluster.device.memory_bytes
    peak = max(stage.peak for stage in stages)
    assert all(stage.exact for stage in stages)
    assert peak <= room
    assert price.trained_peak is not None
    # The price's peak is the fullest stage's, which may lie between those that were run.
    assert price.trained_peak >= peak * (1 - BAND)
    assert all(abs(stage.predicted / stage.peak - 1) <= BAND for stage in stages)
    if price.is_folded:
        assert price.memory["peak"] == price.trained_peak
    return (
        f"peak {peak / 1e9:.2f} of {room / 1e9:.0f} GB, predicted "
        f"{', '.join(f'{stage.predicted / stage.peak - 1:+.2%}' for stage in stages)}"
    )


BAND = 0.02
