"""Activations of the literal program: crests of schedules, and the closed form beside the fold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from meshwright.config.choices import Schedule
from meshwright.layout.axes import Coordinates
from meshwright.plan.folds.memory import memory
from meshwright.plan.folds.traffic import Transport
from meshwright.plan.plan import Plan
from meshwright.price.cluster import Cluster, Following
from meshwright.price.folded import StageBytes, folded, may_be_fullest, steady
from meshwright.price.price import Price
from meshwright.price.program_memory import crests
from tests.unit.price.ask import ask

MODEL = ("model.preset=llama2-7b", "data.sequence_length=4096", "precision.compute=bfloat16", "batch.micro=2",
         "cluster.software.following=literal")  # fmt: skip
LAYOUTS = (
    "mesh.dp=8 batch.global=32",
    "mesh.dp=8 batch.global=32 parallel.recompute=full parallel.zero=3",
    "mesh.dp=2 mesh.tp=4 batch.global=16 parallel.recompute=selective parallel.zero=1",
    "mesh.tp=8 batch.global=16 parallel.sequence=false parallel.recompute=selective",
    "mesh.tp=2 mesh.pp=4 batch.global=32 parallel.recompute=selective",
    "mesh.dp=2 mesh.pp=4 batch.global=64 parallel.zero=1",
    "mesh.pp=8 batch.global=64 parallel.recompute=full",
    "mesh.pp=4 mesh.tp=2 batch.global=32 parallel.schedule=interleaved parallel.chunks=2",
    "mesh.pp=4 batch.global=32 parallel.schedule=interleaved parallel.chunks=4 parallel.recompute=full",
    "mesh.pp=4 mesh.tp=2 batch.global=32 parallel.schedule=zb-h1",
    "mesh.pp=8 batch.global=48 parallel.schedule=zb-h1 parallel.recompute=full",
    "mesh.pp=4 batch.global=32 parallel.schedule=zb-v parallel.chunks=2",
    "mesh.pp=4 mesh.tp=2 batch.global=32 parallel.schedule=zb-v parallel.chunks=2 parallel.recompute=selective",
    "mesh.dp=2 mesh.cp=4 batch.global=32",
    "mesh.dp=2 mesh.cp=8 batch.global=32 parallel.context=allgather parallel.recompute=full parallel.zero=3",
    "mesh.tp=2 mesh.cp=4 batch.global=32 parallel.context=ulysses parallel.recompute=selective",
    "mesh.pp=2 mesh.cp=4 batch.global=32 parallel.context_inner=2 parallel.schedule=zb-h1",
)
OFFLOADED = (
    "mesh.dp=1 batch.global=8 parallel.offload=optimizer parallel.recompute=full",
    "mesh.dp=2 batch.global=4 parallel.offload=optimizer parallel.zero=1 parallel.recompute=full",
    "mesh.tp=4 batch.global=8 parallel.offload=optimizer",
    "mesh.pp=4 batch.global=32 parallel.offload=optimizer parallel.recompute=selective",
)
"""States come for their update, when activations are gone: both at once were counted, a fifth too much and more."""
EVERY = (*LAYOUTS, "mesh.pp=4 batch.global=128 parallel.schedule=gpipe parallel.recompute=full")
"""And one that keeps every micro-batch, however many there are."""


def test_crests_of_the_picture() -> None:
    """zb-h1, stage 1 of 3: F0 F1 B0 F2 B1 W0 F3 ...; graphs and factors of all chunks, which are the only one."""
    found = crests(Schedule.ZB_H1, 1, 3, 6, 1)
    assert {(one[0], one[3]) for one in found} == {(2, 1), (1, 2)}
    assert all(one[:3] == (one[0],) * 3 and one[3:] == (one[3],) * 3 for one in found)


def test_crests_of_1f1b_are_the_stages_behind_it() -> None:
    for stage in range(4):
        assert crests(Schedule.ONE_F_ONE_B, stage, 4, 12, 1) == ((4 - stage,) * 3 + (0, 0, 0),)
    assert crests(Schedule.ONE_F_ONE_B, 0, 4, 2, 1) == ((2, 2, 2, 0, 0, 0),)


def test_more_micro_batches_than_fill_a_pipeline_have_no_other_crests() -> None:
    for schedule, chunks in ((Schedule.ONE_F_ONE_B, 1), (Schedule.INTERLEAVED, 3), (Schedule.ZB_H1, 1)):
        for stage in range(4):
            assert set(crests(schedule, stage, 4, 12, chunks)) == set(crests(schedule, stage, 4, 24, chunks))


@pytest.mark.parametrize("layout", [*EVERY, *OFFLOADED])
def test_the_closed_form_is_near_the_fold(layout: str) -> None:
    price = ask(*MODEL, *layout.split())
    assert price.is_folded
    closed = float(price.estimates.memory.peak[0])
    assert closed == pytest.approx(price.memory["peak"], rel=0.07)


@pytest.mark.parametrize("layout", EVERY)
def test_of_experts_too(layout: str) -> None:
    words = ("model.family=mixtral", "model.layers=16", "model.hidden=2048", "model.heads=16", "model.kv_heads=8",
             "model.head_dim=128", "model.ffn=4096", "model.experts=16", "model.experts_per_token=2",
             "model.vocab=32000", *MODEL[1:])  # fmt: skip
    if "selective" in layout:  # no recipe for blocks with experts
        layout = layout.replace("selective", "full")
    price = ask(*words, *layout.split())
    assert price.is_folded
    assert 0.93 < float(price.estimates.memory.peak[0]) / price.memory["peak"] < 1.12  # most at ZeRO-3, of three units


@pytest.mark.parametrize("layout", EVERY)
def test_whether_it_fits_is_what_the_fold_says_folded_or_not(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Just above and below the fold's peak, where it is folded, and far above it, where it is not."""
    stages: list[int] = []

    def noted(plan: Plan, cluster: Cluster, some: Iterable[int]) -> tuple[StageBytes, ...]:
        stages.extend(some)
        return folded(plan, cluster, stages[-1:])

    usual = ask(*MODEL[:-1], *layout.split())
    assert usual.trained_peak is not None
    values = usual.target.values
    needed = usual.trained_peak * values["memory.slack"] + values["memory.slack_bytes"]
    for share, fits in ((0.999, False), (1.001, True), (2.0, True)):
        device = replace(usual.cluster.device, memory_bytes=int(needed * share))
        with monkeypatch.context() as patched:
            patched.setattr("meshwright.price.price.folded", noted)
            assert Price(usual.plan, replace(usual.cluster, device=device)).fits_trained is fits
        assert bool(stages) is (share < 2)
        stages.clear()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_filled_pipeline_has_the_peak_of_the_whole_step(layout: str) -> None:
    """What a price folds, with few micro-batches, and for `trained_peak` of other software on a few stages only."""
    words = [word for word in layout.split() if not word.startswith("batch.global")]
    price = ask(*MODEL, *words, "batch.global=256")
    plan, stages = price.plan, range(price.plan.degrees.pp)
    assert steady(plan).accumulation < plan.accumulation
    whole = [memory(plan, plan.degrees.rank(Coordinates(pp=stage)), transport=Transport.NCCL, fused_norms=True)
             for stage in stages]  # fmt: skip
    assert price.stage_peaks == tuple(each.peak_bytes for each in whole)
    assert price.trained_peak == price.memory["peak"] == max(price.stage_peaks[each] for each in may_be_fullest(plan))
    assert folded(plan, price.cluster, stages) == tuple((each.peak_bytes, each.largest) for each in whole)


def test_a_layout_that_does_not_run_has_no_peak_of_its_own() -> None:
    assert ask("model.preset=bloom-176b", "batch.global=8", "mesh.tp=8").trained_peak is None
    assert ask(*MODEL, "mesh.tp=2", "batch.global=8", "precision.compute=float8").trained_peak is None


def test_other_trainers_memory_is_told_beside_the_programs_own() -> None:
    """70B, tensor 4, ZeRO-3 within 16, selective: 83 GB by usual kernels, 118 GB by the program of `train`."""
    words = ("model.preset=llama3-70b", "data.sequence_length=8192", "batch.global=2048", "precision.compute=bfloat16",
             "mesh.dp=1024", "mesh.tp=4", "parallel.zero=3", "parallel.zero_shard_within=16",
             "parallel.recompute=selective", "batch.micro=2")  # fmt: skip
    usual = ask(*words)
    assert usual.fits
    assert not usual.fits_trained
    assert "as `meshwright train` runs it" in str(usual)
    literal = Price(
        usual.plan, replace(usual.cluster, software=replace(usual.cluster.software, following=Following.LITERAL))
    )
    assert usual.trained_peak == literal.memory["peak"] > 110e9
