"""The planner's own first choice for published runs: legal by its own rules, in memory, and no slower than the run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from meshwright.arch.resolve import arch_from_model
from meshwright.config.load import load_run
from meshwright.price.catalogue import cluster_of
from meshwright.price.ranking import with_keys
from meshwright.price.request import planned
from meshwright.price.search import search
from tests.unit.price import published

_TIMED = [row for row in published.rows() if row["measured"].get("iter_time_s")]
_FEW = [row for row in _TIMED if "titan-70B-256g" in str(row["id"])][:1]
_MORE = [row for row in _TIMED if "Llama-3.1-70B-GB300-64g-FP8" in str(row["id"])][:1] + _TIMED[::10]


def check(row: dict) -> None:
    asked = published.words(row)
    gpus, words = int(asked[3]), asked[4:]
    cluster = cluster_of(asked[1], [word for word in words if word.startswith("cluster.")])
    run = load_run(None, [word for word in words if not word.startswith("cluster.")])
    own = choices().as_it_ran(run, gpus, cluster)
    best = search(run, gpus, cluster, top=1, budget=30_000).best
    plan = planned(with_keys(run, best.keys), arch_from_model(run.model), gpus)  # refuses what a run would
    assert plan.degrees.ranks == gpus
    assert best.price.memory["reserved"] <= cluster.device.memory_bytes
    assert best.price.fits_trained
    if own.fits and own.fits_trained:  # kernels of other trainers keep less than the program of `train` does
        assert best.price.step_seconds <= own.step_seconds * 1.001, f"{row['id']}: {dict(best.keys)}"


def choices() -> ModuleType:
    file = Path(__file__).parents[3] / "benchmarks" / "choices.py"
    spec = importlib.util.spec_from_file_location("choices", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("row", _FEW, ids=lambda row: str(row["id"]))
def test_a_first_choice_is_legal_fits_and_is_no_slower(row: dict) -> None:
    check(row)


@pytest.mark.prove
@pytest.mark.parametrize("row", _MORE, ids=lambda row: str(row["id"]))
def test_first_choices_for_every_tenth_published_run(row: dict) -> None:
    check(row)
