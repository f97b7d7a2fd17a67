"""What if: answers follow the direction of the question, and budgets the arithmetic."""

import dataclasses
from itertools import islice

import pytest

from meshwright.config.load import load_run
from meshwright.price.catalogue import cluster_of
from meshwright.price.ranking import Ranking
from meshwright.price.search import search
from meshwright.price.whatif import Case, budget, budget_told, cases, slower, tokens_of, told
from tests.unit.price.ask import ask


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    words = ("model.preset=llama3-8b", "data.sequence_length=4096", "batch.global=64", "precision.compute=bfloat16")
    fixed = {"mesh.cp": 1, "parallel.schedule": "1f1b", "parallel.offload": "none", "batch.micro": 1,
             "parallel.recompute": "selective", "parallel.sequence": True, "mesh.pp": 1}  # fmt: skip
    return search(load_run(None, words), 16, "h100-sxm", fixed=fixed, top=2)


@pytest.fixture(scope="module")
def answers(ranking: Ranking) -> dict[tuple[str, str], Case]:
    return {(case.question, case.name): case for case in cases(ranking)}


def test_more_devices_take_less_time_and_lose_efficiency(answers: dict[tuple[str, str], Case]) -> None:
    strong = [answers["strong scaling", f"{count} devices"] for count in (8, 16, 32, 64)]
    assert [case.seconds for case in strong] == sorted((case.seconds for case in strong), reverse=True)
    assert strong[1].efficiency == pytest.approx(1.0)
    assert strong[1].kept_seconds == pytest.approx(strong[1].seconds)
    assert strong[3].efficiency < 1


def test_weak_scaling_gives_every_device_as_much() -> None:
    """Half of 7 devices is 3, and got half the sequences, 10 of 21: more than 3 a device, and none that 3 divide."""
    words = ("model.preset=gpt2", "data.sequence_length=512", "batch.global=21", "precision.compute=bfloat16")
    fixed = {"mesh.tp": 1, "mesh.pp": 1, "mesh.cp": 1}
    first = islice(cases(search(load_run(None, words), 7, "h100-sxm", fixed=fixed, top=1)), 8)
    weak = [case.name for case in first if case.question == "weak scaling"]
    assert weak == ["3 devices, 9 sequences", "7 devices, 21 sequences", "14 devices, 42 sequences",
                    "28 devices, 84 sequences"]  # fmt: skip


def test_slower_links_never_help(answers: dict[tuple[str, str], Case], ranking: Ranking) -> None:
    now = ranking.best.price.step_seconds
    half, quarter = (answers["slower links", f"network x {factor}"].seconds for factor in (0.5, 0.25))
    assert now <= half <= quarter
    assert answers["slower links", "network x 0.25"].kept_seconds >= quarter * (1 - 1e-9)


def test_every_question_is_asked(answers: dict[tuple[str, str], Case]) -> None:
    assert {question for question, _ in answers} == {
        "strong scaling", "weak scaling", "slower links", "longer sequences", "other devices",
    }  # fmt: skip


def test_slower_scales_measured_figures_too() -> None:
    cluster = cluster_of("h100-sxm")
    measured = dataclasses.replace(cluster, network=dataclasses.replace(cluster.network, measured_bytes_per_s=3e10))
    half = slower(measured, network=0.5)
    assert half.network.measured_bytes_per_s == 1.5e10
    assert half.node == measured.node


def test_a_budget_is_steps_times_seconds(ranking: Ranking) -> None:
    price = ranking.best.price
    found = budget(price, 1e9)
    assert found["steps"] == -(-1e9 // tokens_of(price))
    assert found["dollars"] == pytest.approx(found["device_hours"] * 12.29)
    assert found["device_hours"] == pytest.approx(found["steps"] * price.step_seconds * 16 / 3600)


def test_a_budget_of_one_step_is_told_as_one() -> None:
    """It was 1 steps, 0.0 days, 0 device hours, price a device hour unknown."""
    told = budget_told(ask(cluster="local"), 1000)[1][-1]
    assert "1e+03 tokens: 1 step, " in told
    assert "days" not in told
    assert "the price of a device hour is unknown" in told


def test_what_is_refused_is_told_with_its_reason() -> None:
    """Learned positions end: a longer sequence was "nothing is legal and fits", as if memory had run out."""
    words = ("model.preset=gpt2", "data.sequence_length=1024", "batch.global=8", "precision.compute=bfloat16")
    fixed = {"mesh.dp": 2, "mesh.tp": 1, "mesh.pp": 1, "mesh.cp": 1, "parallel.zero": 0, "batch.micro": 1}
    found, lines = told(search(load_run(None, words), 2, "h100-sxm", fixed=fixed, top=1))
    longer = [case for case in found if case["question"] == "longer sequences"]
    assert len(longer) == 2
    assert all(not case["seconds"] and "1024" in case["refused"] for case in longer)
    assert any("nothing: " in line and "positions" in line for line in lines)
