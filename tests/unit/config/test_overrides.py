"""``section.key=value``: TOML values, bare words as strings, and later words over earlier ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.errors import RequestError
from meshwright.config.load import change_run, dump_run, load_run
from meshwright.config.overrides import parse_override, parse_overrides, superseded
from meshwright.config.schema import RunConfig

# typed                                   key                     value
READ = [
    ("mesh.dp=2", ("mesh", "dp"), 2),
    ("mesh.dp = 2", ("mesh", "dp"), 2),
    ("seed=1_000", ("seed",), 1000),
    ("train.tokens=1e9", ("train", "tokens"), 1e9),
    ("parallel.compile=true", ("parallel", "compile"), True),
    ("parallel.schedule=zb-v", ("parallel", "schedule"), "zb-v"),
    ("parallel.schedule=1f1b", ("parallel", "schedule"), "1f1b"),
    ('parallel.schedule="1f1b"', ("parallel", "schedule"), "1f1b"),
    ("parallel.schedule='1f1b'", ("parallel", "schedule"), "1f1b"),
    ("optimizer.betas=[0.9,0.95]", ("optimizer", "betas"), [0.9, 0.95]),
    ("mesh.order=[dp,pp, ep,cp,tp]", ("mesh", "order"), ["dp", "pp", "ep", "cp", "tp"]),
    ('mesh.order=["dp",pp]', ("mesh", "order"), ["dp", "pp"]),
    ("x=[true,a-b,'c d',1]", ("x",), [True, "a-b", "c d", 1]),
    ("model.rope_scaling={kind=yarn, factor=4.0}", ("model", "rope_scaling"), {"kind": "yarn", "factor": 4.0}),
    ("model.rope_scaling.factor=4", ("model", "rope_scaling", "factor"), 4),
    ("data.source=texts/**/*.jsonl", ("data", "source"), "texts/**/*.jsonl"),
    ("data.source=s3://bucket/a=b", ("data", "source"), "s3://bucket/a=b"),
    ('name=""', ("name",), ""),
]


@pytest.mark.parametrize(("typed", "key", "value"), READ)
def test_values_are_toml_and_bare_words_are_strings(typed, key, value):
    override = parse_override(typed)
    assert (override.key, override.value, override.text) == (key, value, typed)
    assert type(override.value) is type(value)


@pytest.mark.parametrize(
    ("typed", "part"),
    [
        ("mesh.dp", "mesh.dp=VALUE"),
        ("mesh.dp=", "no value"),
        ("=3", '"" is no key'),
        ("mesh dp=3", '"mesh dp" is no key'),
        ("mesh..dp=3", "is no key"),
        ("optimizer.betas=[0.9,", "no TOML value"),
        ('name="x', "no TOML value"),
        ("name='a\nb=1'", "one line"),
    ],
)
def test_what_is_no_override_is_refused(typed, part):
    with pytest.raises(RequestError) as caught:
        parse_override(typed)
    assert part in str(caught.value)
    assert typed in str(caught.value)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000, "0x" + "f" * 5000, "{a=" * 2000])
def test_a_value_too_large_to_read_is_refused(value):
    with pytest.raises(RequestError):
        load_run(overrides=[f"seed={value}"])


def test_all_bad_overrides_are_told():
    with pytest.raises(RequestError, match="2 problems"):
        parse_overrides(["mesh.dp", "mesh.tp=2", "mesh.pp="])


def test_later_words_win():
    assert load_run(overrides=["mesh.dp=4", "mesh.dp=8"]).mesh.dp == 8


def test_of_a_key_given_twice_the_last_counts_and_is_told():
    assert not superseded(["mesh.dp=4", "mesh.tp=4", "a", "=", "b=", "seed=1", "seed=1"])
    told = superseded(["mesh.dp=4", "seed=1", "mesh.dp =8", "seed=2", "mesh.dp=4"])
    assert told == ("mesh.dp is given 3 times: mesh.dp=4 counts", "seed is given 2 times: seed=2 counts")


def test_overrides_lie_over_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('name = "a"\n[mesh]\ndp = 4\ntp = 2\n')
    run = load_run(file, ["mesh.dp=8", "seed=3"])
    assert (run.name, run.seed, run.mesh.dp, run.mesh.tp) == ("a", 3, 8, 2)


def test_an_override_takes_the_place_of_its_alternatives_in_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[model]\npreset = "demo"\n[train]\nsteps = 10\n[precision]\nreduce = "float32"\n')
    run = load_run(file, ["model.hf=folder", "train.tokens=1e6", "precision.compute=float64"])
    assert (run.model.preset, run.model.hf) == (None, "folder")
    assert (run.train.steps, run.train.tokens) == (None, 1_000_000)
    assert run.precision.reduce == "float64"
    assert load_run(file, ["train.steps=20"]).train.steps == 20


def test_change_run_validates_again():
    run = change_run(RunConfig(), ["mesh.dp=4", "precision.compute=float64"])
    assert (run.mesh.dp, run.precision.master) == (4, "float64")
    assert RunConfig().mesh.dp == 2
    with pytest.raises(RequestError, match=r"mesh\.dp = 0"):
        change_run(run, ["mesh.dp=0"])


@settings(deadline=None)
@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_is_read_or_refused(key, value):
    for text in (f"{key}={value}", f"mesh.dp={value}", value):
        try:
            run = load_run(overrides=[text])
        except RequestError as error:
            told = str(error)
        else:
            told = dump_run(run)
        assert told
