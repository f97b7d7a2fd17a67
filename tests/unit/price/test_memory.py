"""Memory: figures that are commonly wrong, papers' tables, and the fold of the program."""

import re
from dataclasses import replace

import pytest

from meshwright.layout.axes import Coordinates
from meshwright.plan.category import Category
from meshwright.plan.folds.ledger import ledger
from meshwright.plan.folds.memory import memory
from meshwright.plan.folds.sizes import states
from meshwright.plan.folds.traffic import Transport
from meshwright.plan.program import program
from tests.unit.price import published
from tests.unit.price.ask import ask

BIG = ("model.preset=llama2-70b", "batch.global=64", "batch.micro=1", "data.sequence_length=4096")
HALF = ("precision.compute=bfloat16", "precision.reduce=bfloat16")
BEFORE = ("parameters", "gradients", "optimizer", "master")


def model_states(*words: str, gpus: int) -> float:
    memory = ask(*words, cluster="h100-sxm", gpus=gpus).memory
    return sum(memory[name] for name in BEFORE) / 1e9


def test_70b_with_zero_1_on_64_devices_takes_293_gb_and_not_15() -> None:
    """4 N + 12 N / 64: only the optimizer's 12 bytes are divided; with float32 gradients 6 N more."""
    params = 68.98e9
    assert model_states(*BIG, *HALF, "parallel.zero=1", gpus=64) == pytest.approx(
        params * (4 + 12 / 64) / 1e9, rel=0.01
    )
    wide = model_states(*BIG, "precision.compute=bfloat16", "parallel.zero=1", gpus=64)
    assert wide == pytest.approx(params * (6 + 12 / 64) / 1e9, rel=0.01)
    assert not ask(*BIG, *HALF, "parallel.zero=1", gpus=64).fits


def test_the_figure_quoted_for_it_is_that_of_zero_3() -> None:
    literal = (*BIG, *HALF, "parallel.zero=3", "parallel.recompute=full", "cluster.software.following=literal")
    price = ask(*literal, gpus=64)
    closed = price.estimates.memory
    sharded = float(closed.parameters[0] + closed.optimizer[0] + closed.master[0])
    assert sharded / 1e9 == pytest.approx(68.98 * 14 / 64, rel=0.01)  # 16 N / 64 with its gradient's shard
    assert closed.buffers[0] > 3 * 2 * 0.8e9  # three gathered units of 0.85e9 parameters
    assert price.fits


def test_zero_2_saves_nothing_where_gradients_are_accumulated() -> None:
    """Usual trainers keep whole gradients over micro-batches; the literal program scatters every micro-batch's."""
    step = ("model.preset=llama3-8b", "batch.micro=1", "data.sequence_length=2048", "precision.compute=bfloat16")
    many, once = (*step, "batch.global=64"), (*step, "batch.global=8")
    literal = "cluster.software.following=literal"

    def gradients(*words: str) -> float:
        return ask(*words, gpus=8).memory["gradients"]

    assert gradients(*many, "parallel.zero=2") == gradients(*many, "parallel.zero=1")
    assert gradients(*once, "parallel.zero=2") == pytest.approx(gradients(*once, "parallel.zero=1") / 8)
    assert gradients(*many, "parallel.zero=2", literal) < gradients(*many, "parallel.zero=1", literal) / 3


@pytest.mark.parametrize(("zero", "megabytes"), [(0, 16.0), (1, 7.0), (2, 5.5), (3, 4.0)])
def test_a_million_parameters_on_four_ranks(zero: int, megabytes: float) -> None:
    """deepspeedai/DeepSpeed#4527: 2 + 2 + 12 bytes, divided as the stage says; each term is shown on its own."""
    small = (
        "model.family=llama", "model.layers=2", "model.hidden=128", "model.heads=4", "model.kv_heads=4",
        "model.ffn=512", "model.vocab=1024", "data.sequence_length=64", "batch.global=4", "batch.micro=1",
    )  # fmt: skip
    price = ask(*small, *HALF, f"parallel.zero={zero}", gpus=4)
    params = price.plan.arch.layers * (4 * 128**2 + 3 * 128 * 512) + 2 * 1024 * 128 + 5 * 128
    memory = price.memory
    live = sum(memory[name] for name in BEFORE)
    if zero == 3:  # usual trainers keep no second copy of a shard: master is the parameter
        live += 2 * params / 4
    assert live / params == pytest.approx(megabytes, rel=0.01)
    assert memory["peak"] > live * 0.9
    assert all(memory[name] > 0 for name in ("activations", "logits", "buffers"))


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_routed_activations_do_not_fall_with_the_expert_degree(ep: int) -> None:
    """NVIDIA/Megatron-LM#6782: each expert rank brings tokens of its own."""
    words = (
        "model.preset=qwen3-30b-a3b", "batch.micro=1", "batch.global=8", "data.sequence_length=4096",
        "precision.compute=bfloat16", f"mesh.ep={ep}", f"mesh.dp={8 // ep}",
    )  # fmt: skip
    price = ask(*words, gpus=8)
    memory = price.memory
    assert price.worst_peak >= memory["peak"]
    assert (price.worst_peak > memory["peak"]) == (ep > 1)  # all tokens to one rank: a bound, shown beside it
    assert memory["activations"] == ask(*words[:-2], "mesh.dp=8", gpus=8).memory["activations"]
    assert memory["parameters"] < 2.1 * 30.6e9 / ep + 2e9 * 2


def test_1f1b_keeps_the_first_stages_activations_whatever_p() -> None:
    """The activations of the first stage do not fall with p: L / p blocks times p micro-batches."""
    words = (
        "model.preset=gpt3-175b", "data.sequence_length=2048", "batch.micro=1", "batch.global=64",
        "precision.compute=bfloat16", "mesh.tp=8", "mesh.dp=1",
    )  # fmt: skip
    kept = []
    for pp in (2, 4, 8):
        stages = f"parallel.stages={[96 // pp] * pp}"
        kept.append(ask(*words, f"mesh.pp={pp}", stages, gpus=8 * pp).memory["activations"])
    assert max(kept) == pytest.approx(min(kept), rel=0.03)


@pytest.mark.parametrize("row", published.rows("memory-formula"), ids=lambda row: str(row["id"]))
def test_activations_of_a_papers_bars(row: published.Row) -> None:
    """Korthikanti et al. 2022, figure 1: computed activations of the first stage, GiB, 34 sbh + 5 a s^2 b."""
    words = [word for word in published.words(row) if not word.startswith("batch.global")]
    micros = 8 * row["layout"]["pp"]
    stack = ["model.dropout=0.1", f"batch.global={micros * row['micro_batch'] * row['layout']['dp']}"]
    memory = ask(*words[4:], *stack, cluster=words[1], gpus=int(words[3])).memory
    said = re.search(r"activations ([0-9.]+) GiB", row["measured"]["memory_kind"])
    assert said is not None
    assert memory["activations"] / 2**30 == pytest.approx(float(said[1]), rel=0.08)


OWN = (
    "model.preset=llama3-8b", "model.layers=8", "data.sequence_length=1024", "precision.compute=bfloat16",
    "batch.micro=1", "cluster.software.following=literal",
)  # fmt: skip


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2])
def test_states_are_those_of_the_programs_fold(zero: int, pp: int) -> None:
    price = ask(*OWN, f"parallel.zero={zero}", f"mesh.pp={pp}", "mesh.dp=2", "batch.global=16", gpus=2 * pp)
    folded = states(price.plan, program(price.plan, 0))
    closed = price.estimates.memory
    if closed.stage[0] == 0:
        for category in (Category.PARAMETERS, Category.OPTIMIZER, Category.MASTER):
            assert float(getattr(closed, category.value)[0]) == pytest.approx(folded[category], rel=1e-3)


@pytest.mark.parametrize(
    "layout", [(1, 0, "none"), (1, 1, "full"), (2, 0, "none"), (2, 1, "full"), (1, 3, "none"), (4, 0, "none")]
)
def test_the_closed_peak_is_near_that_of_the_fold(layout: tuple[int, int, str]) -> None:
    pp, zero, recompute = layout
    words = (f"mesh.pp={pp}", f"parallel.zero={zero}", f"parallel.recompute={recompute}", "batch.global=32")
    price = ask(*OWN, *words, "mesh.dp=2", gpus=2 * pp)
    assert price.is_folded
    assert float(price.estimates.memory.peak[0]) == pytest.approx(max(price.stage_peaks), rel=0.06)


@pytest.mark.parametrize(
    "words",
    [
        ("mesh.tp=2", "mesh.dp=2"),
        ("mesh.tp=4", "parallel.sequence=false", "parallel.zero=1", "mesh.dp=2"),
        ("mesh.tp=2", "mesh.pp=2", "mesh.dp=2", "parallel.recompute=full"),
        ("mesh.tp=2", "parallel.recompute=selective"),
        ("mesh.tp=2", "mesh.dp=2", "parallel.zero=3", "parallel.offload=params"),
        ("mesh.pp=2", "mesh.dp=2", "parallel.zero=1", "parallel.offload=optimizer", "parallel.schedule=zb-h1"),
        ("mesh.tp=2", "mesh.dp=4", "parallel.zero=2", "parallel.zero_shard_within=2"),
    ],
    ids=" ".join,
)
def test_what_the_trainer_runs_is_priced_by_the_folds_themselves(words: tuple[str, ...]) -> None:
    """`estimate` tells the very figures that a run predicts, and measures against, in its ledger."""
    price = ask(*OWN, *words, "batch.global=32", cluster="local")
    plan = price.plan
    assert price.is_folded
    for rank in (0, plan.degrees.ranks - 1):
        assert replace(price, rank=rank).traffic == ledger(plan, rank, transport=Transport.DIRECT)
    stages = [plan.degrees.rank(Coordinates(pp=stage)) for stage in range(plan.degrees.pp)]
    timelines = [memory(plan, rank, transport=Transport.DIRECT) for rank in stages]
    assert price.stage_peaks == tuple(each.peak_bytes for each in timelines)
    fullest = max(timelines, key=lambda each: each.peak_bytes)
    told = {name: price.memory[name] for name in (*BEFORE, "activations", "logits", "buffers")}
    assert told == {category.value: size for category, size in fullest.largest.items()}
    for rank in range(plan.degrees.ranks):  # ranks of a stage are alike
        at = plan.degrees.coordinates(rank).pp
        assert memory(plan, rank, transport=Transport.DIRECT).peak_bytes == price.stage_peaks[at]
