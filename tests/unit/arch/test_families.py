"""Models from the fields of a run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.arch.arch import Arch, Experts, Norm, Rope, RopeScaling
from meshwright.arch.catalogue import preset
from meshwright.arch.families import FAMILIES, SHAPES, arch_from_fields, check_runs, family_template
from meshwright.arch.huggingface import hf_config
from meshwright.arch.resolve import arch_from_model
from meshwright.config.choices import Family
from meshwright.config.errors import RequestError
from meshwright.config.model_section import ModelConfig

SIZES: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 256}


def llama(**fields: Any) -> Arch:
    return arch_from_fields(FAMILIES[Family.LLAMA], {**SIZES, **fields})


def model(**fields: Any) -> Arch:
    return arch_from_model(ModelConfig.model_validate(fields))


def test_sizes_that_follow_from_others() -> None:
    assert (llama().kv_heads, llama().head_dim) == (4, 16)
    assert llama(heads=5, head_dim=16).head_dim == 16
    assert llama(kv_heads=2).kv_heads == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": None}, "needs model.layers as well"),
        ({"vocab": None, "ffn": None}, "needs model.ffn, model.vocab as well"),
        ({"kv_heads": 3}, "kv_heads must divide heads; what works: 2, 4, 1"),
        ({"heads": 5}, "heads must divide hidden where model.head_dim is not given"),
        ({"head_dim": 15}, "must be even"),
        ({"dropout": 1.0}, "model.dropout = 1.0"),
        ({"experts": 8}, 'family "llama" has no experts; what works: mixtral, qwen3_moe, deepseek_v3'),
        ({"rope_scaling": {"kind": "llama3", "factor": 8.0}}, "original_max_positions"),
        ({"rope_scaling": {"kind": "linear", "factor": 0.5}}, "at least 1"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"sliding_window": -1}, "sliding_window = -1"),
    ],
)
def test_impossible_models_are_refused_by_the_key(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llama(**fields)


def test_learned_positions_need_their_number() -> None:
    with pytest.raises(RequestError, match=r"learned positions need model\.max_positions"):
        arch_from_fields(FAMILIES[Family.GPT2], SIZES)
    with pytest.raises(RequestError, match="no rotary positions"):
        arch_from_fields(FAMILIES[Family.GPT2], {**SIZES, "max_positions": 32, "rope_theta": 1e4})


def test_experts_from_fields() -> None:
    mixtral = FAMILIES[Family.MIXTRAL]
    arch = arch_from_fields(mixtral, {**SIZES, "experts": 8, "experts_per_token": 2})
    assert arch.experts == Experts(count=8, active=2, ffn=128)
    with pytest.raises(RequestError, match=r"needs model\.experts, model\.experts_per_token as well"):
        arch_from_fields(mixtral, SIZES)
    with pytest.raises(RequestError, match=r"between 1 and model\.experts = 8"):
        arch_from_fields(mixtral, {**SIZES, "experts": 8, "experts_per_token": 9})
    sizes = {key: value for key, value in SIZES.items() if key != "ffn"}
    narrow = {"experts": 8, "experts_per_token": 2, "expert_ffn": 48}
    assert arch_from_fields(FAMILIES[Family.QWEN3_MOE], {**sizes, **narrow}).ffn == 48


def test_unknown_family_names_the_nearest() -> None:
    with pytest.raises(RequestError, match=r'"lama": is not a family known here; what works: llama'):
        family_template("lama")


def test_shapes_are_priced_and_not_run() -> None:
    for family, why in SHAPES.items():
        with pytest.raises(RequestError, match=why.split("(")[0]):
            check_runs(FAMILIES[family])
    check_runs(preset("demo"))


def test_a_run_file_without_a_model_has_the_demonstration() -> None:
    assert model() == preset("demo")


def test_fields_beside_a_preset_replace_its_own() -> None:
    arch = model(preset="llama3.1-8b", layers=2, dropout=0.1)
    assert (arch.layers, arch.hidden, arch.dropout) == (2, 4096, 0.1)
    assert arch.rope == preset("llama3.1-8b").rope
    narrower = model(preset="llama2-7b", hidden=2048)
    assert (narrower.head_dim, narrower.kv_heads) == (64, 32)
    assert model(preset="qwen3-0.6b", hidden=512).head_dim == 128  # published apart from hidden / heads: kept


def test_a_family_with_rope_scaling() -> None:
    scaling = {"kind": "yarn", "factor": 4.0, "original_max_positions": 64, "beta_fast": 16.0}
    arch = model(family="qwen2", **SIZES, rope_scaling=scaling)
    assert arch.rope == Rope(theta=1e6, scaling=RopeScaling.YARN, factor=4.0, original_positions=64, beta_fast=16.0)
    assert arch.qkv_bias
    assert arch.norm is Norm.RMS


def test_a_contradicting_family_is_refused() -> None:
    with pytest.raises(RequestError, match=r'contradicts model\.preset = "gpt2", a "gpt2"'):
        model(preset="gpt2", family="llama")


def test_loaded_weights_keep_their_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(llama(max_positions=64))))
    given = {"hf": str(tmp_path), "weights": "load"}
    assert model(**given, dropout=0.1, rope_theta=5e5).dropout == 0.1
    with pytest.raises(RequestError, match=r"has no room for model\.layers"):
        model(**given, layers=3)
    assert model(hf=str(tmp_path), layers=3).layers == 3


def test_dropout_of_a_foreign_configuration_holds_until_the_run_file_says_another(tmp_path: Path) -> None:
    config = hf_config(preset("gpt2")) | {"resid_pdrop": 0.1, "embd_pdrop": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model(hf=str(tmp_path)).dropout == 0.1
    assert model(hf=str(tmp_path), dropout=0.0).dropout == 0.0
