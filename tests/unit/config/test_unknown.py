"""Unknown keys are refused and name the nearest valid key, also for keys of other trainers."""

import pytest

from meshwright.config.errors import RequestError
from meshwright.config.keys import _ELSEWHERE, key_names
from meshwright.config.load import build_run, load_run

# typed                                  named first
NEAREST = [
    ("optimizer.learning_rat=1", "optimizer.learning_rate"),
    ("optimizer.lr=1", "optimizer.learning_rate"),
    ("mesh.zero=3", "parallel.zero"),  # right name, wrong table
    ("zero=3", "parallel.zero"),  # right name, no table
    ("msh.dp=3", "mesh"),
    ("sed=3", "seed"),
    ("batch.global_=3", "batch.global"),
    ("train.max_steps=3", "train.steps"),
    ("parallel.chunk=3", "parallel.chunks"),
    ("gradient_accumulation_steps=4", "batch.global"),
    ("model.rope_scaling.fctor=4", "model.rope_scaling.factor"),
    ("trak.wandb=true", "track"),
]


@pytest.mark.parametrize(("typed", "nearest"), NEAREST)
def test_an_unknown_key_names_the_nearest(typed, nearest):
    others = ["model.rope_scaling.kind=yarn", "model.rope_scaling.factor=4"] if "rope" in typed else []
    with pytest.raises(RequestError, match="is no key of") as caught:
        load_run(overrides=[*others, typed])
    assert caught.value.nearest[0] == nearest


def test_a_key_that_resembles_nothing_lists_its_table():
    with pytest.raises(RequestError, match=r"is no key of \[track\]") as caught:
        load_run(overrides=["track.qqqqq=1"])
    assert caught.value.nearest == ("track.strict", "track.tensorboard", "track.wandb")


def test_the_names_of_other_trainers_lead_to_keys_that_exist():
    assert {name for names in _ELSEWHERE.values() for name in names} <= set(key_names())


def test_all_problems_are_told_at_once(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[mesh]\ndp = 0\n[optimizer]\nlr = 1\nbetas = [0.9, 2.0]\n")
    with pytest.raises(RequestError) as caught:
        load_run(file, ["mesh.tp=-1"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert len(caught.value.problems) == 4
    assert "4 problems" in lines[0]
    for line, *parts in zip(
        lines[1:],
        ["mesh.dp = 0", "mesh.tp = -1", "optimizer.betas = [0.9, 2.0]", "optimizer.lr"],
        ["at least 1", "at least 1", "2.0 must be below 1", "no key"],
        strict=True,
    ):
        assert all(part in line for part in parts), line
    assert str(file) in lines[1]
    assert str(file) not in lines[2]  # typed on the command line


def test_a_table_is_a_table():
    for tables in ({"mesh": 3}, {"mesh": [{"dp": 2}]}, {"batch": "16"}):
        with pytest.raises(RequestError, match="must be a table"):
            build_run(tables)
