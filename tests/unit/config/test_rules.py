"""Rules between keys, and what "what works" promises."""

import pytest

from meshwright.config.choices import AxisName, Dtype, Fill, OptimizerKind, Resume, Schedule
from meshwright.config.errors import RequestError
from meshwright.config.load import build_run, load_run
from meshwright.config.schema import RunConfig


def refusal(*overrides):
    with pytest.raises(RequestError) as caught:
        load_run(overrides=overrides)
    return caught.value


# schedule      chunks that work   chunks that do not
CHUNKS = [
    ("naive", [1], [2, 3]),
    ("gpipe", [1], [2, 3]),
    ("1f1b", [1], [2, 3]),
    ("interleaved", [2, 3, 8], [1]),
    ("zb-h1", [1], [2, 3]),
    ("zb-v", [2], [1, 3]),
]


@pytest.mark.parametrize(("schedule", "fitting", "others"), CHUNKS)
def test_chunks_follow_the_schedule(schedule, fitting, others):
    for chunks in fitting:
        run = load_run(overrides=[f"parallel.schedule={schedule}", f"parallel.chunks={chunks}"])
        assert (run.parallel.schedule, run.parallel.chunks) == (Schedule(schedule), chunks)
    for chunks in others:
        error = refusal(f"parallel.schedule={schedule}", f"parallel.chunks={chunks}")
        assert f"parallel.chunks = {chunks}" in error.value
        assert f'"{schedule}"' in error.value
        for name in ("interleaved", "zb-v"):
            assert name in error.rule
        chunks_that_work, schedule_that_works = (nearest.replace(" ", "") for nearest in error.nearest)
        load_run(overrides=[f"parallel.schedule={schedule}", chunks_that_work])
        load_run(overrides=[schedule_that_works, f"parallel.chunks={chunks}"])


def test_sgd_has_no_decay_and_refuses_one():
    assert load_run(overrides=["optimizer.kind=sgd"]).optimizer.weight_decay == 0
    assert load_run(overrides=["optimizer.kind=sgd", "optimizer.weight_decay=0"]).optimizer.kind is OptimizerKind.SGD
    error = refusal("optimizer.kind=sgd", "optimizer.weight_decay=0.1")
    assert "optimizer.weight_decay = 0.1" in error.value
    assert "optimizer.weight_decay = 0" in error.nearest


def test_float64_is_for_all_three_types():
    precision = load_run(overrides=["precision.compute=float64"]).precision
    assert (precision.compute, precision.reduce, precision.master) == (Dtype.FLOAT64,) * 3
    for key in ("reduce", "master"):
        assert f"precision.{key}" in refusal("precision.compute=float64", f"precision.{key}=float32").value


@pytest.mark.parametrize("compute", list(Dtype))
@pytest.mark.parametrize("master", list(Dtype))
def test_the_master_is_the_same_or_wider(compute, master):
    allowed = master is not Dtype.FLOAT8 and (master is compute or master.num_bytes > compute.num_bytes)
    if allowed:
        run = load_run(overrides=[f"precision.compute={compute}", f"precision.master={master}"])
        assert (run.precision.compute, run.precision.master) == (compute, master)
    else:
        error = refusal(f"precision.compute={compute}", f"precision.master={master}")
        assert f'precision.master = "{master}"' in error.value
        dtype = error.nearest[0].rsplit("= ", 1)[-1].strip('"')
        load_run(overrides=[f"precision.compute={compute}", f"precision.master={dtype}"])


def test_the_learning_rate_does_not_end_above_its_peak():
    error = refusal("optimizer.learning_rate=1e-4")
    assert "0.0003" in error.value
    assert "0.0001" in error.rule
    assert load_run(overrides=["optimizer.learning_rate=1e-4", "optimizer.schedule=constant"])
    assert load_run(overrides=["optimizer.learning_rate=1e-4", error.nearest[0].replace(" ", "")])


@pytest.mark.parametrize("axes", ["[pp,dp,ep,cp]", "[pp,dp,ep,cp,cp]", "[pp,dp,ep,cp,tp,tp]", "[]"])
def test_the_order_names_each_axis_once(axes):
    error = refusal(f"mesh.order={axes}")
    assert "mesh.order" in error.value
    assert error.nearest == ('["pp", "dp", "ep", "cp", "tp"]',)


def test_only_the_ring_has_an_inner_group():
    load_run(overrides=["parallel.context_inner=2"])
    for context in ("allgather", "ulysses"):
        assert context in refusal("parallel.context_inner=2", f"parallel.context={context}").value


def test_steps_or_tokens():
    assert load_run(overrides=["train.tokens=1e9"]).train.tokens == 1_000_000_000
    assert load_run(overrides=["train.tokens=1e9"]).train.steps is None
    assert "train.tokens" in refusal("train.tokens=1e9", "train.steps=3").value
    assert refusal("train.steps=1e3").nearest == ("1000",)


def test_a_model_comes_from_one_place():
    assert load_run().model.preset == "demo"
    assert load_run(overrides=["model.hf=folder"]).model.preset is None
    assert load_run(overrides=["model.family=llama"]).model.preset is None
    assert load_run(overrides=["model.layers=2"]).model.preset == "demo"
    assert "model.hf" in refusal("model.hf=folder", "model.preset=demo").value
    assert "model.hf" in refusal("model.weights=load").rule


@pytest.mark.parametrize("name", ["a/b", "..", ".", ".cache", "/etc", "a\\b", "a\0b", "x" * 300])
def test_a_run_folder_stays_in_its_place(name):
    with pytest.raises(RequestError, match="one folder") as caught:
        build_run({"name": name})
    build_run({"name": caught.value.nearest[0].strip('"')})


def test_special_values_are_enums():
    assert load_run(overrides=["mesh.dp=fill"]).mesh.dp is Fill.FILL
    assert load_run(overrides=["checkpoint.resume=none"]).checkpoint.resume is Resume.NONE
    assert load_run(overrides=["checkpoint.resume=a/folder"]).checkpoint.resume == "a/folder"
    assert load_run().mesh.order == (AxisName.PP, AxisName.DP, AxisName.EP, AxisName.CP, AxisName.TP)


def test_sequence_with_one_tensor_rank_is_silent():
    for value in ("true", "false"):
        load_run(overrides=[f"parallel.sequence={value}", "mesh.tp=1"])


def test_a_run_cannot_be_changed_in_place():
    run = RunConfig()
    with pytest.raises(ValueError, match="frozen"):
        run.mesh.dp = 4
    assert hash(run) == hash(RunConfig())


# given                            nearest, best first
NEAREST = [
    ("mesh.dp=0", ("1",)),
    ("mesh.tp=2.5", ("2", "3")),
    ("mesh.tp=0.5", ("1",)),
    ("mesh.tp=true", ("1",)),
    ("mesh.tp='4'", ("4",)),
    ("mesh.dp=fil", ('"fill"',)),
    ("parallel.zero=7", ("3",)),
    ("parallel.compile=True", ("true",)),
    ("parallel.compile=off", ("false",)),
    ("parallel.schedule=zbh1", ('"zb-h1"',)),
    ("parallel.recompute=Full", ('"full"',)),
    ("precision.compute=bf16", ('"bfloat16"',)),
    ("precision.compute=fp32", ('"float32"',)),
    ("name=7", ('"7"',)),
    ("optimizer.learning_rate='1e-3'", ("0.001",)),
    ("optimizer.learning_rate=-1", ("0.0",)),
    ("optimizer.betas=[0.9]", ("[0.9, 0.95], the default",)),
]


@pytest.mark.parametrize(("given", "nearest"), NEAREST)
def test_what_works_is_near(given, nearest):
    error = refusal(given)
    assert error.nearest == nearest
    key = given.partition("=")[0]
    for each in nearest:
        load_run(overrides=[f"{key}={each.removesuffix(', the default')}", "optimizer.min_learning_rate=0"])
