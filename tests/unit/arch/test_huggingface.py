"""Foreign configurations: both spellings of RoPE, every size kept, nothing dropped in silence."""

from __future__ import annotations

import json
import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.arch.arch import Activation, Arch, Experts, Norm, Rope, RopeScaling
from meshwright.arch.catalogue import preset
from meshwright.arch.families import FAMILIES, arch_from_fields, family_template
from meshwright.arch.huggingface import ConfigWarning, arch_from_hf, hf_config, read_hf_config
from meshwright.config.choices import Family
from meshwright.config.errors import RequestError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
MIXTURE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": 256,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def rope_of(**keys: Any) -> Rope:
    rope = arch_from_hf({**LLAMA, **keys}).rope
    assert rope is not None
    return rope


def test_sizes_are_read_and_what_is_silent_means_what_transformers_means() -> None:
    arch = arch_from_hf(LLAMA)
    sizes = (arch.layers, arch.hidden, arch.heads, arch.kv_heads, arch.head_dim, arch.ffn, arch.vocab)
    assert sizes == (2, 64, 4, 2, 16, 128, 256)
    assert not arch.tie_embeddings
    assert arch.rope == Rope(theta=10_000.0)
    silent = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "rms_norm_eps")}
    assert (arch_from_hf(silent).kv_heads, arch_from_hf(silent).norm_eps) == (4, 1e-6)


@pytest.mark.parametrize(("heads", "head_dim"), [(4, 32), (4, 8)])
def test_head_dim_is_kept_in_and_out(heads: int, head_dim: int) -> None:
    """B90: a converter that computed hidden / heads again."""
    arch = arch_from_hf({**LLAMA, "num_attention_heads": heads, "head_dim": head_dim})
    assert arch.head_dim == head_dim
    assert hf_config(arch)["head_dim"] == head_dim
    assert arch_from_hf(hf_config(arch)) == arch


def test_old_and_new_spelling_of_rope_are_one() -> None:
    values = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = rope_of(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **values})
    oldest = rope_of(rope_theta=5e5, rope_scaling={"type": "llama3", **values})
    new = rope_of(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **values})
    nested = rope_of(rope_parameters={"full_attention": {"rope_type": "llama3", "rope_theta": 5e5, **values}})
    assert old == oldest == new == nested
    assert old == Rope(theta=5e5, scaling=RopeScaling.LLAMA3, factor=8.0, original_positions=64, low=1.0, high=4.0)


def test_yarn_takes_its_context_and_factor_from_the_model_where_it_is_silent() -> None:
    assert rope_of(rope_scaling={"rope_type": "yarn", "factor": 4.0}).original_positions == 128
    rope = rope_of(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 32, "mscale": 0.7})
    assert (rope.factor, rope.mscale, rope.truncate) == (4.0, 0.7, True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, 'rope type "longrope".*linear, llama3, yarn'),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "short_factor": [1]}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 4.0}},
            "contradicts",
        ),
        ({"hidden_act": "relu"}, 'hidden_act = "relu".*gelu'),
        ({"sliding_window": 64}, "sliding_window"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "causal language model"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "head_dim"),
        ({"num_key_value_heads": 3}, "kv_heads must divide heads"),
        ({"hidden_size": None}, '"hidden_size"'),
        ({"model_type": "lama"}, 'model_type = "lama".*llama'),
        ({"model_type": "falcon"}, "llama.*gpt2"),
    ],
)
def test_what_is_not_built_is_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        arch_from_hf({**LLAMA, **keys})


ZERO_CONTEXT = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": "64"}, "config.json: hidden_size = '64': must be a whole number"),
        ({"hidden_size": 64.0}, "config.json: hidden_size = 64.0: must be a whole number"),
        ({"num_hidden_layers": True}, "config.json: num_hidden_layers = True: must be a whole number"),
        ({"max_position_embeddings": "x"}, "config.json: max_position_embeddings = 'x': must be a whole number"),
        ({"head_dim": 0}, "model.head_dim = 0: must be at least 1"),
        ({"num_attention_heads": 0}, "config.json: has no head_dim, and 0 heads do not divide hidden size 64"),
        ({"rms_norm_eps": "1e-5"}, "config.json: rms_norm_eps = '1e-5': must be a number"),
        ({"rms_norm_eps": math.nan}, "config.json: rms_norm_eps = nan: must be a number"),
        ({"rms_norm_eps": 10**400}, "must be a number"),
        ({"tie_word_embeddings": "false"}, "config.json: tie_word_embeddings = 'false': must be true or false"),
        ({"attention_bias": 0}, "config.json: attention_bias = 0: must be true or false"),
        ({"hidden_act": 3}, "config.json: hidden_act = 3: must be text"),
        ({"attention_dropout": "x"}, "config.json: attention_dropout = 'x': must be a number"),
        ({"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM': must be a list of texts"),
        ({"architectures": [3]}, "config.json: architectures = [3]: must be a list of texts"),
        ({"layer_types": [3]}, "config.json: layer_types = [3]: must be a list of texts"),
        ({"rope_scaling": "linear"}, "config.json: rope_scaling = 'linear': must be an object"),
        ({"rope_parameters": []}, "config.json: rope_parameters = []: must be an object"),
        ({"rope_theta": 0}, "model.rope_theta = 0.0: must be positive"),
        ({"rope_parameters": {"rope_theta": "1"}}, "rope_parameters.rope_theta = '1': must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor = '2': must be a number"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": []}}},
            "config.json: rope_parameters.full_attention.rope_theta = []: must be a number",
        ),
        ({"rope_scaling": ZERO_CONTEXT}, "original_max_position_embeddings = 0: must be at least 1"),
        ({"model_type": ["llama"]}, "model_type = \"['llama']\": is not a family known here"),
        ({**QWEN2, "num_hidden_layers": 10**9, "use_sliding_window": True}, "must be at most 65536"),
    ],
)
def test_values_of_another_kind_are_refused_by_key(keys: dict[str, Any], message: str) -> None:
    """A text "false" is true in Python, and a size in quotes no size: nothing is taken for something else."""
    with pytest.raises(RequestError, match=re.escape(message)):
        arch_from_hf({**LLAMA, **keys})


@pytest.mark.parametrize(
    "key", [key for key in LLAMA if not key.startswith(("model", "num_", "hidden", "inter", "vocab"))]
)
def test_null_is_silence(key: str) -> None:
    assert arch_from_hf({**LLAMA, key: None}) == arch_from_hf({k: v for k, v in LLAMA.items() if k != key})


@pytest.mark.parametrize(
    ("keys", "window", "layers"),
    [
        ({"sliding_window": 16}, 0, ()),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 16, ()),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, 16, (1,)),
        ({"sliding_window": 16, "use_sliding_window": True}, 0, ()),
        (
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            16,
            (0,),
        ),
    ],
)
def test_qwen_says_which_layers_slide(keys: dict[str, Any], window: int, layers: tuple[int, ...]) -> None:
    arch = arch_from_hf({**QWEN2, **keys})
    assert (arch.sliding_window, arch.windowed_layers) == (window, layers)
    assert arch_from_hf(hf_config(arch)) == arch


def test_mistral_slides_unless_it_says_null() -> None:
    assert arch_from_hf(MISTRAL).sliding_window == 4096
    still = arch_from_hf({**MISTRAL, "sliding_window": None})
    assert still.sliding_window == 0
    assert arch_from_hf(hf_config(still)) == still


def test_gpt2_is_read_with_its_own_words() -> None:
    arch = arch_from_hf(GPT2)
    assert (arch.ffn, arch.max_positions, arch.kv_heads, arch.rope) == (256, 32, 4, None)
    assert (arch.norm, arch.activation, arch.gated, arch.tie_embeddings) == (
        Norm.LAYER,
        Activation.GELU_TANH,
        False,
        True,
    )
    assert (arch.qkv_bias, arch.output_bias, arch.mlp_bias) == (True, True, True)


def test_dropout_inside_attention_is_told_and_its_other_sites_are_kept() -> None:
    with pytest.warns(ConfigWarning, match="attn_pdrop = 0.1.*never applied inside attention probabilities"):
        arch = arch_from_hf({**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1})
    assert arch.dropout == 0.1
    with pytest.warns(ConfigWarning, match="attention_dropout = 0.2"):
        assert arch_from_hf({**LLAMA, "attention_dropout": 0.2}).dropout == 0
    with pytest.raises(RequestError, match=r"embd_pdrop = 0.2 with resid_pdrop = 0.0"):
        arch_from_hf({**GPT2, "embd_pdrop": 0.2})


def test_keys_that_nobody_knows_are_told() -> None:
    with pytest.warns(ConfigWarning, match="without effect on llama: residual_multiplier"):
        arch_from_hf({**LLAMA, "residual_multiplier": 0.5})


def test_expert_layers() -> None:
    arch = arch_from_hf({**MIXTURE, "norm_topk_prob": True, "mlp_only_layers": [0]})
    assert arch.experts == Experts(count=8, active=2, ffn=48, normalise=True, dense_layers=1)
    assert arch_from_hf(hf_config(arch)) == arch
    with pytest.raises(RequestError, match=r"mlp_only_layers = \[1\]"):
        arch_from_hf({**MIXTURE, "mlp_only_layers": [1]})
    with pytest.raises(RequestError, match="decoder_sparse_step = 2"):
        arch_from_hf({**MIXTURE, "decoder_sparse_step": 2})


def test_export_is_refused_where_the_family_has_no_word() -> None:
    with pytest.raises(RequestError, match="llama with its qk_norm"):
        hf_config(replace(arch_from_hf(LLAMA), qk_norm=True))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family is not Family.DEEPSEEK_V3])
def test_a_transformers_config_of_every_family_survives_the_way_in_and_out(family: Family) -> None:
    transformers = pytest.importorskip("transformers")
    arch = tiny(family)
    foreign = transformers.AutoConfig.for_model(**hf_config(arch))
    again = arch_from_hf(json.loads(foreign.to_json_string()))
    assert again == arch
    assert transformers.AutoConfig.for_model(**hf_config(again)).to_dict() == foreign.to_dict()


# our field      family            absent key
ABSENT = [
    ("kv_heads", Family.LLAMA, "num_key_value_heads"),
    ("kv_heads", Family.MISTRAL, "num_key_value_heads"),
    ("kv_heads", Family.QWEN2, "num_key_value_heads"),
    ("kv_heads", Family.QWEN3, "num_key_value_heads"),
    ("kv_heads", Family.MIXTRAL, "num_key_value_heads"),
    ("kv_heads", Family.QWEN3_MOE, "num_key_value_heads"),
    ("head_dim", Family.QWEN3, "head_dim"),
    ("norm_eps", Family.MIXTRAL, "rms_norm_eps"),
    ("norm_eps", Family.LLAMA, "rms_norm_eps"),
    ("max_positions", Family.MISTRAL, "max_position_embeddings"),
]


@pytest.mark.parametrize(("field", "family", "key"), ABSENT)
def test_an_absent_key_means_what_it_means_to_transformers(field: str, family: Family, key: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = hf_config(replace(tiny(family), heads=32, hidden=512))
    del config[key]
    theirs = transformers.AutoConfig.for_model(**config)
    assert getattr(arch_from_hf(config), field) == getattr(theirs, key)


def test_null_is_an_answer_where_it_says_something() -> None:
    assert arch_from_hf({**MISTRAL, "num_attention_heads": 16, "num_key_value_heads": None}).kv_heads == 16
    deepseek = hf_config(preset("deepseek-v3"))
    latent = arch_from_hf({**deepseek, "q_lora_rank": None}).latent
    assert latent is not None
    assert latent.query_rank == 0
    absent = arch_from_hf({key: value for key, value in deepseek.items() if key != "q_lora_rank"}).latent
    assert absent is not None
    assert absent.query_rank == 1536


def test_a_switch_without_its_window_takes_the_default_window() -> None:
    assert arch_from_hf({**MIXTURE, "use_sliding_window": True}).sliding_window == 4096
    assert arch_from_hf({**MIXTURE, "use_sliding_window": True, "sliding_window": None}).sliding_window == 0


def tiny(family: Family) -> Arch:
    experts = FAMILIES[family].experts and Experts(8, 2, 128)
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 256, "max_positions": 128}
    arch = replace(FAMILIES[family], **sizes, kv_heads=2, head_dim=16, experts=experts)
    if family is Family.MIXTRAL:
        return replace(arch, ffn=128)
    return replace(arch, kv_heads=4) if arch.rope is None else arch


def test_reading_from_a_folder_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_hf_config(tmp_path) == read_hf_config(tmp_path / "config.json") == LLAMA
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    for name, message in (
        ("nowhere", '^model.hf = ".*nowhere": is neither a config.json'),
        ("list.json", "object"),
        ("broken.json", "not JSON"),
    ):
        with pytest.raises(RequestError, match=message):
            read_hf_config(tmp_path / name)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "twice.json").write_text('{"hidden_size": 64, "x": 1, "hidden_size": 96}')
    for path, message in (
        (tmp_path / "deep.json", "is not JSON"),
        (tmp_path / "twice.json", "is not JSON: key 'hidden_size' stands twice"),
        ("x" * 5000, "cannot be read"),
        ("~no-such-user/x", "home"),
    ):
        with pytest.raises(RequestError, match=message):
            read_hf_config(path)


def test_a_published_configuration_is_read_without_a_warning() -> None:
    published = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert arch_from_hf(published) == preset("llama3.1-8b")


def test_a_dense_width_that_no_block_has_keeps_no_mixture_from_its_config() -> None:
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 257, "experts": 4, "experts_per_token": 2}
    arch = arch_from_fields(family_template("mixtral"), sizes | {"expert_ffn": 24})
    assert arch.ffn == 48
    assert hf_config(arch)["intermediate_size"] == 24
    with pytest.raises(RequestError, match="experts"):
        hf_config(arch_from_fields(family_template("mixtral"), sizes | {"shared_experts": 1}))
