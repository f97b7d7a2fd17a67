"""Every key of the run file: it exists, has the documented default, changes something, and refuses what it must."""

import tomllib
from pathlib import Path

import pytest

from meshwright.config.errors import RequestError
from meshwright.config.keys import key_names
from meshwright.config.load import build_run, dump_run, load_run
from meshwright.config.overrides import parse_override
from meshwright.config.problems import shown
from meshwright.config.schema import RunConfig

DOCUMENTED = tomllib.loads((Path(__file__).parent / "documented.toml").read_text())

# Keys without a default value in the run file.
UNSET = {
    "model.hf", "model.family", "model.layers", "model.hidden", "model.heads", "model.kv_heads", "model.head_dim",
    "model.ffn", "model.vocab", "model.rope_theta", "model.tie_embeddings", "model.norm_eps", "model.max_positions",
    "model.sliding_window", "model.qkv_bias", "model.qk_norm", "model.experts", "model.experts_per_token",
    "model.expert_ffn", "model.shared_experts", "model.dense_layers", "train.tokens",
    "model.rope_scaling.kind", "model.rope_scaling.factor", "model.rope_scaling.original_max_positions",
    "model.rope_scaling.low_frequency_factor", "model.rope_scaling.high_frequency_factor",
    "model.rope_scaling.beta_fast", "model.rope_scaling.beta_slow", "model.rope_scaling.attention_factor",
    "model.rope_scaling.mscale", "model.rope_scaling.mscale_all_dim",
}  # fmt: skip

YARN = "model.rope_scaling.kind=yarn model.rope_scaling.factor=4"

# A changed value of every key, with the overrides it cannot stand without.
CHANGED = {
    "name": "other", "seed": "7",
    "model.preset": "other", "model.hf": "folder", "model.family": "gpt2", "model.layers": "3", "model.hidden": "48",
    "model.heads": "6", "model.kv_heads": "2", "model.head_dim": "16", "model.ffn": "96", "model.vocab": "300",
    "model.rope_theta": "500000.0", "model.tie_embeddings": "true", "model.norm_eps": "1e-6",
    "model.max_positions": "512", "model.sliding_window": "64", "model.qkv_bias": "true", "model.qk_norm": "true",
    "model.experts": "8", "model.experts_per_token": "2", "model.expert_ffn": "64", "model.shared_experts": "1",
    "model.dense_layers": "1", "model.weights": "load model.hf=folder", "model.dropout": "0.1",
    "model.rope_scaling.kind": "linear model.rope_scaling.factor=2",
    "model.rope_scaling.factor": "8.0 model.rope_scaling.kind=yarn",
    "model.rope_scaling.original_max_positions": f"8192 {YARN}",
    "model.rope_scaling.low_frequency_factor": f"1.0 {YARN}",
    "model.rope_scaling.high_frequency_factor": f"4.0 {YARN}",
    "model.rope_scaling.beta_fast": f"32.0 {YARN}", "model.rope_scaling.beta_slow": f"1.0 {YARN}",
    "model.rope_scaling.attention_factor": f"1.2 {YARN}", "model.rope_scaling.mscale": f"0.7 {YARN}",
    "model.rope_scaling.mscale_all_dim": f"0.7 {YARN}",
    "data.source": "texts/*.txt", "data.text_field": "content", "data.dtype": "uint32",
    "data.tokenizer": "tokenizer.json", "data.sequence_length": "128", "data.order": "sequential",
    "data.documents": "masked", "data.eval_fraction": "0.1",
    "mesh.dp": "4", "mesh.tp": "2", "mesh.pp": "2", "mesh.cp": "2", "mesh.ep": "2", "mesh.order": "[dp,pp,ep,cp,tp]",
    "parallel.zero": "3", "parallel.zero_shard_within": "2", "parallel.reshard_after_forward": "false",
    "parallel.bucket_bytes": "1048576", "parallel.sequence": "false", "parallel.asynchronous_tensor": "true",
    "parallel.schedule": "gpipe", "parallel.chunks": "3 parallel.schedule=interleaved", "parallel.stages": "[1,3]",
    "parallel.context": "ulysses", "parallel.context_inner": "2", "parallel.recompute": "selective",
    "parallel.offload": "params", "parallel.offload_to": "scratch", "parallel.compile": "true",
    "moe.balance": "bias", "moe.auxiliary_loss": "0.001", "moe.z_loss": "0.001", "moe.statistic": "lagged",
    "moe.capacity": "1.25",
    "batch.global": "32", "batch.micro": "2",
    "optimizer.kind": "sgd", "optimizer.learning_rate": "0.01", "optimizer.schedule": "linear",
    "optimizer.warmup_steps": "0", "optimizer.min_learning_rate": "0.0", "optimizer.betas": "[0.9,0.999]",
    "optimizer.eps": "1e-3", "optimizer.weight_decay": "0.0", "optimizer.clip_norm": "0.0",
    "precision.compute": "bfloat16", "precision.reduce": "bfloat16", "precision.master": "float64",
    "train.steps": "5", "train.tokens": "1e9", "train.eval_every": "0", "train.log_every": "10",
    "train.output": "elsewhere", "train.device": "cpu",
    "checkpoint.every": "20", "checkpoint.keep": "5", "checkpoint.asynchronous": "false",
    "checkpoint.resume": "runs/a/checkpoints/step-00000060", "checkpoint.accept_changes": "true",
    "survive.heartbeat_seconds": "5.0", "survive.restarts": "0", "survive.on_loss": "shrink",
    "survive.on_nonfinite": "rollback",
    "track.strict": "true", "track.tensorboard": "true", "track.wandb": "true",
}  # fmt: skip


def flat(tables, prefix=""):
    values = {}
    for key, value in tables.items():
        values.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return values


def overrides(key):
    value, *others = CHANGED[key].split(" ")
    return [f"{key}={value}", *others]


def wrong_values(key):
    """Values of other types, and out of range, by the type of the key's value; as typed on a command line."""
    value = flat(load_run(overrides=overrides(key)).tables())[key]
    if isinstance(value, bool):
        wrong = ["1", '"true"', "yes"]
    elif isinstance(value, int):
        wrong = ["2.5", "true", '"4"', "-1", "99999999999999999999"]
    elif isinstance(value, float):
        wrong = ["true", '"1"', "nan", "inf", "-0.5"]
    elif isinstance(value, list):
        wrong = ["[]", "[1.5, true]", '"x"']
    else:
        wrong = ["3", "true", "1.5", '""']
    return [*wrong, "{unheard = 1}", "2024-02-03"]


def test_the_documented_run_file_is_the_default_run():
    assert build_run(DOCUMENTED) == RunConfig() == load_run()
    assert RunConfig().tables() == DOCUMENTED


def test_every_key_is_documented_and_nothing_else():
    assert set(key_names()) == set(flat(DOCUMENTED)) | UNSET
    assert set(CHANGED) == set(key_names())


@pytest.mark.parametrize("key", CHANGED)
def test_a_changed_value_changes_the_resolved_run(key):
    run = load_run(overrides=overrides(key))
    value = flat(run.tables())[key]
    assert value != flat(DOCUMENTED).get(key)
    assert run != RunConfig()
    assert dump_run(run) != dump_run(RunConfig())
    assert build_run(tomllib.loads(dump_run(run))) == run


@pytest.mark.parametrize("key", CHANGED)
def test_a_wrong_value_is_refused_with_key_value_and_rule(key):
    refused = []
    for wrong in wrong_values(key):
        with pytest.raises(RequestError) as caught:
            load_run(overrides=[*overrides(key)[1:], f"{key}={wrong}"])
        message = str(caught.value)
        assert f"{key} = {shown(parse_override(f'{key}={wrong}').value)}: " in message
        assert "must be" in message or "must name" in message
        refused.append(wrong)
    assert len(refused) >= 5


@pytest.mark.parametrize("key", [key for key in CHANGED if len(key.rpartition(".")[2]) > 3])
def test_a_misspelt_key_names_the_nearest(key):
    section, _, name = key.rpartition(".")
    misspelt = f"{section}.{name}s"[0 if section else 1 :]
    others = YARN.split() if "rope_scaling" in key else []
    with pytest.raises(RequestError, match="is no key of") as caught:
        load_run(overrides=[*others, f"{misspelt}=1"])
    assert key in caught.value.nearest


def test_every_choice_of_every_enum_is_accepted_somewhere():
    from meshwright.config import choices

    schema = RunConfig.model_json_schema()["$defs"]
    for name in choices.__all__:
        enum = schema[name].get("enum", [schema[name].get("const")])
        assert enum == [choice.value for choice in getattr(choices, name)]


def test_every_key_has_a_description():
    schema = RunConfig.model_json_schema(by_alias=True)
    for section in [schema, *(each for each in schema["$defs"].values() if "properties" in each)]:
        for key, value in section["properties"].items():
            assert value.get("description") or "$ref" in value, key
