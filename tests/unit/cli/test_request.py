"""The run file and its overrides on a command line."""

from pathlib import Path

import pytest

from meshwright.cli.request import split_request
from meshwright.config.errors import RequestError


def test_a_word_without_an_equals_sign_is_the_run_file():
    assert split_request([]) == (None, [])
    assert split_request(["mesh.dp=2", "a/run.toml", "seed=3"]) == (Path("a/run.toml"), ["mesh.dp=2", "seed=3"])


@pytest.mark.parametrize(
    ("words", "value", "works"),
    [
        (["mesh.dp", "2"], "mesh.dp 2", "mesh.dp=2"),
        (["mesh.dp", "=", "2"], "mesh.dp = 2", "mesh.dp=2"),
        (["mesh.dp=", "2"], "mesh.dp= 2", "mesh.dp=2"),
        (["mesh.dp", "=2"], "mesh.dp =2", "mesh.dp=2"),
        (["mesh.dp"], "mesh.dp", "mesh.dp=VALUE"),
        (["mesh.dp", "mesh.tp"], "mesh.dp", "mesh.dp=VALUE"),
        (["mesh.tp=1", "mesh.dp", "2", "mesh.pp=3"], "mesh.dp 2", "mesh.dp=2"),
        (["=3"], "=3", "section.key=value"),
        (["=", "3"], "=", "section.key=value"),
    ],
)
def test_a_torn_override_is_put_together(words, value, works):
    with pytest.raises(RequestError) as caught:
        split_request(words)
    assert caught.value.value == value
    assert caught.value.nearest == (works,)


def test_one_run_file_is_enough():
    with pytest.raises(RequestError, match=r"a\.toml b\.toml: are several run files"):
        split_request(["a.toml", "b.toml"])


def test_a_file_that_is_called_like_a_key_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("seed").write_text("")
    assert split_request(["seed", "mesh.dp=2"]) == (Path("seed"), ["mesh.dp=2"])
