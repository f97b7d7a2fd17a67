"""The run through its own loop: equal figures on 1, 2 and 4 ranks, whole files, equal bytes."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from meshwright.config.load import build_run
from meshwright.launch.status import RankStatus
from meshwright.testing.ranks import run, run_cases
from meshwright.train.job import Job
from meshwright.train.loop import train_joined
from meshwright.train.outcome import Outcome
from tests.ranks.train.jobs import evaluations, lines, steps, tiny_job

WORLDS = (1, 2, 4)
KEYS = ["step", "loss", "grad_norm", "learning_rate", "tokens", "trained_tokens", "seconds", "tokens_per_second", "mfu"]


def trained(rank: int, job: Job) -> Outcome:
    return train_joined(RankStatus(), job)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Job, list[Outcome]]]:
    folder = tmp_path_factory.mktemp("runs")
    jobs = {world: tiny_job(folder, world) for world in WORLDS}
    return {world: (job, run(trained, world, job)) for world, job in jobs.items()}


def test_losses_and_norms_do_not_depend_on_the_ranks(runs: dict[int, tuple[Job, list[Outcome]]]) -> None:
    reference = steps(runs[1][0])
    assert [line["step"] for line in reference] == list(range(6))
    assert reference[-1]["loss"] < reference[0]["loss"]
    for world in WORLDS[1:]:
        for ours, theirs in zip(steps(runs[world][0]), reference, strict=True):
            for key in ("loss", "grad_norm"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-12)
            for key in ("step", "learning_rate", "tokens", "trained_tokens"):
                assert ours[key] == theirs[key]


def test_every_layout_has_the_figures_of_one_rank(runs: dict[int, tuple[Job, list[Outcome]]], tmp_path: Path) -> None:
    layouts: dict[str, dict[str, dict[str, Any]]] = {
        "zero3": {"parallel": {"zero": 3}},
        "tp2": {"mesh": {"dp": 1, "tp": 2}},
        "pp2": {"mesh": {"dp": 1, "pp": 2}},
    }
    jobs = [tiny_job(tmp_path, 2, name, **sections) for name, sections in layouts.items()]
    outcomes = run_cases(trained, 2, jobs)
    for job, here, there in zip(jobs, *outcomes, strict=True):
        assert here.traffic_equal, job.plan.name
        assert (here.first_loss, here.last_loss, here.eval_loss) == (there.first_loss, there.last_loss, there.eval_loss)
        for ours, theirs in zip(steps(job), steps(runs[1][0]), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12), job.plan.name
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-12), job.plan.name
        assert here.eval_loss == pytest.approx(runs[1][1][0].eval_loss, rel=1e-12)
        assert lines(job, "data.jsonl") == lines(runs[1][0], "data.jsonl")


def test_evaluation_is_equal_on_any_number_of_ranks(runs: dict[int, tuple[Job, list[Outcome]]]) -> None:
    """A factor meant for training once made evaluation losses as many times too large as there were ranks."""
    reference = evaluations(runs[1][0])
    assert [line["step"] for line in reference] == [2, 5]
    assert 2.0 < reference[-1]["eval_loss"] < reference[0]["eval_loss"] < 6.0
    for world in WORLDS[1:]:
        for ours, theirs in zip(evaluations(runs[world][0]), reference, strict=True):
            assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-12)
            assert ours["eval_tokens"] == theirs["eval_tokens"]


def test_evaluation_reads_the_whole_split_once(runs: dict[int, tuple[Job, list[Outcome]]]) -> None:
    from meshwright.train.feed import open_corpus

    split = open_corpus(runs[1][0]).eval
    assert split.num_samples % 8, "the last batch must be padded, or the test shows nothing"
    assert evaluations(runs[1][0])[0]["eval_tokens"] == split.num_samples * split.sequence_length


def test_samples_of_each_step_are_written_and_equal(runs: dict[int, tuple[Job, list[Outcome]]]) -> None:
    reference = lines(runs[1][0], "data.jsonl")
    assert [line["step"] for line in reference] == list(range(6))
    assert all(len(line["samples"]) == 8 for line in reference)
    for world in WORLDS[1:]:
        assert lines(runs[world][0], "data.jsonl") == reference


def test_lines_have_the_documented_keys(runs: dict[int, tuple[Job, list[Outcome]]]) -> None:
    for line in steps(runs[2][0]):
        assert list(line) == [*KEYS, "peak_memory_bytes"]
        assert line["tokens"] == line["trained_tokens"] == 8 * 32
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])


def test_all_ranks_end_alike(runs: dict[int, tuple[Job, list[Outcome]]]) -> None:
    for job, outcomes in runs.values():
        assert {(each.steps, each.first_loss, each.last_loss, each.eval_loss) for each in outcomes} == {
            (6, steps(job)[0]["loss"], steps(job)[-1]["loss"], evaluations(job)[-1]["eval_loss"])
        }


@pytest.mark.parametrize("world", WORLDS)
def test_predicted_traffic_is_what_was_sent(runs: dict[int, tuple[Job, list[Outcome]]], world: int) -> None:
    job, outcomes = runs[world]
    account = json.loads((job.folder / "ledger.json").read_text())
    assert account["traffic_equal"] is True
    assert all(outcome.traffic_equal for outcome in outcomes)

    def rows(side: str) -> list[dict[str, Any]]:
        return sorted(account[side]["traffic"], key=json.dumps)

    assert rows("predicted") == rows("measured")
    assert bool(rows("measured")) is (world > 1)
    for side in ("predicted", "measured"):
        assert account[side]["plan"] == job.plan.hash
        assert account[side]["ranks"] == world
        assert len(account[side]["memory"]["per_rank"]) == world
    for category in ("parameters", "optimizer", "master"):
        assert account["measured"]["memory"][category] == account["predicted"]["memory"][category]


def test_the_folder_holds_the_run_and_its_plan(runs: dict[int, tuple[Job, list[Outcome]]]) -> None:
    job = runs[2][0]
    again = build_run(tomllib.loads((job.folder / "run.toml").read_text()))
    assert again.name == "dp2"
    stored = json.loads((job.folder / "plan.json").read_text())
    assert (stored["math"], stored["layout"]) == (job.plan.math, job.plan.layout)
    assert runs[1][0].plan.math == runs[2][0].plan.math


def test_the_rate_of_a_step_counts_optimizer_steps(runs: dict[int, tuple[Job, list[Outcome]]]) -> None:
    """Peak 3e-3, floor 3e-4, two steps of warm-up, cosine over the other four; on every number of ranks."""
    want = [1.5e-3, 3e-3, *(3e-4 + 2.7e-3 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4))]
    for job, _ in runs.values():
        assert [line["learning_rate"] for line in steps(job)] == pytest.approx(want, rel=1e-15)


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_finished_run_is_left_alone(runs: dict[int, tuple[Job, list[Outcome]]]) -> None:
    job = runs[1][0]
    before = contents(job.folder)
    assert train_joined(RankStatus(), job).already
    assert contents(job.folder) == before


def test_no_trained_token_is_loss_zero_and_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A zero count once made the loss NaN."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "x" * 400, "completion": "y" * 40}) + "\n")
    job = tiny_job(
        tmp_path, 1, data={"source": str(prompts), "order": "sequential", "eval_fraction": 0.0},
        train={"steps": 4}, batch={"global": 4},
    )  # fmt: skip
    outcome = train_joined(RankStatus(), job)
    seen = [(line["trained_tokens"], line["loss"], line["grad_norm"]) for line in steps(job)]
    assert [count for count, _, _ in seen] == [
        0,
        0,
        0,
        17,
    ]  # 3 x 128 tokens of the prompt; then tokens 385 to 416, trained from 400 on
    assert seen[:3] == [(0, 0.0, 0.0)] * 3
    assert seen[3][1] > 1
    assert outcome.eval_loss is None
    told = capsys.readouterr().out
    assert told.count("no trained token") == 1
