"""The same weights give the logits of the reference implementation, at every position, for every family.

The reference computes norms, rotary tables and the softmax in float32 whatever the model's dtype. In the exact
comparison that float32 is float64: the very formulas of the reference run, only wider.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.arch.arch import Activation, Arch, Experts, Norm, Rope, RopeScaling
from meshwright.model import build_decoder
from tests.unit.model.hf_names import logical_weights, stored_tensors
from tests.unit.model.tiny import GPT2, LLAMA, logits_of, rows_of, tokens_of

transformers = pytest.importorskip("transformers")

ORIGINAL = 24  # tokens of context before stretching
LENGTH = 96


@dataclass(frozen=True)
class Family:
    arch: Arch
    config: str
    fields: dict[str, Any]


def scaled(kind: str, **fields: Any) -> dict[str, Any]:
    parameters = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, **fields}
    return {"rope_parameters": parameters, "max_position_embeddings": 4 * ORIGINAL}


YARN = Rope(scaling=RopeScaling.YARN, factor=4.0, original_positions=ORIGINAL)
FAMILIES = {
    "llama": Family(LLAMA, "LlamaConfig", {}),
    "llama tied, one key head": Family(
        replace(LLAMA, kv_heads=1, tie_embeddings=True), "LlamaConfig", {"tie_word_embeddings": True}
    ),
    "llama, all heads, biases": Family(
        replace(LLAMA, kv_heads=4, qkv_bias=True, output_bias=True, mlp_bias=True),
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True},
    ),
    "llama, wide heads": Family(replace(LLAMA, head_dim=32), "LlamaConfig", {}),
    "llama, narrow heads": Family(replace(LLAMA, head_dim=8), "LlamaConfig", {}),
    "llama, linear": Family(
        replace(LLAMA, rope=Rope(scaling=RopeScaling.LINEAR, factor=4.0)), "LlamaConfig", scaled("linear")
    ),
    "llama, llama3": Family(
        replace(LLAMA, rope=Rope(scaling=RopeScaling.LLAMA3, factor=4.0, original_positions=ORIGINAL)),
        "LlamaConfig",
        scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL),
    ),
    "llama, yarn": Family(
        replace(LLAMA, rope=YARN), "LlamaConfig", scaled("yarn", original_max_position_embeddings=ORIGINAL)
    ),
    "llama, yarn, all its fields": Family(
        replace(
            LLAMA, rope=replace(YARN, beta_fast=4.0, beta_slow=0.5, mscale=1.0, mscale_all_dim=0.7, truncate=False)
        ),
        "LlamaConfig",
        scaled(
            "yarn",
            original_max_position_embeddings=ORIGINAL,
            beta_fast=4.0,
            beta_slow=0.5,
            mscale=1.0,
            mscale_all_dim=0.7,
            truncate=False,
        ),
    ),
    "llama, yarn, given factor": Family(
        replace(LLAMA, rope=replace(YARN, attention_factor=1.3)),
        "LlamaConfig",
        scaled("yarn", original_max_position_embeddings=ORIGINAL, attention_factor=1.3),
    ),
    "mistral": Family(replace(LLAMA, family="mistral", sliding_window=7), "MistralConfig", {"sliding_window": 7}),
    "qwen2": Family(replace(LLAMA, family="qwen2", qkv_bias=True), "Qwen2Config", {}),
    "qwen2, last block slides": Family(
        replace(LLAMA, family="qwen2", qkv_bias=True, sliding_window=7, windowed_layers=(1,)),
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": Family(replace(LLAMA, family="qwen3", qk_norm=True, head_dim=24), "Qwen3Config", {}),
    "mixtral": Family(
        replace(LLAMA, family="mixtral", experts=Experts(8, 2, 48)),
        "MixtralConfig",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48},
    ),
    "mixtral, windows": Family(
        replace(LLAMA, family="mixtral", experts=Experts(4, 1, 48), sliding_window=7),
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 48, "sliding_window": 7},
    ),
    "qwen3_moe": Family(
        replace(LLAMA, family="qwen3_moe", qk_norm=True, head_dim=24, experts=Experts(8, 3, 48, normalise=False)),
        "Qwen3MoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": False},
    ),
    "qwen3_moe, normalised, first block dense": Family(
        replace(LLAMA, family="qwen3_moe", qk_norm=True, experts=Experts(8, 3, 48, dense_layers=1)),
        "Qwen3MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "gpt2": Family(replace(GPT2, max_positions=LENGTH), "GPT2Config", {}),
}


def config_of(family: Family) -> Any:
    arch = family.arch
    if arch.family == "gpt2":
        sizes = {
            "n_embd": arch.hidden,
            "n_layer": arch.layers,
            "n_head": arch.heads,
            "n_inner": arch.ffn,
            "n_positions": arch.max_positions,
            "layer_norm_epsilon": arch.norm_eps,
        }
    else:
        sizes = {
            "hidden_size": arch.hidden,
            "num_hidden_layers": arch.layers,
            "num_attention_heads": arch.heads,
            "num_key_value_heads": arch.kv_heads,
            "head_dim": arch.head_dim,
            "intermediate_size": arch.ffn,
            "rms_norm_eps": arch.norm_eps,
            "max_position_embeddings": 4 * ORIGINAL,
            "tie_word_embeddings": arch.tie_embeddings,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        }
    config = getattr(transformers, family.config)(vocab_size=arch.vocab, **{**sizes, **family.fields})
    config._attn_implementation = "eager"
    return config


def build_reference(family: Family, dtype: torch.dtype) -> Any:
    """The reference model with random weights, biases and gains."""
    config = config_of(family)
    if dtype is torch.float64:  # of which grouped products know nothing
        config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
            parameter.copy_(0.15 * noise if parameter.dim() > 1 else 0.2 * noise + 1)
    return model


@contextmanager
def float32_means_float64() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float", "float32"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def both_logits(family: Family, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    reference = build_reference(family, dtype)
    tokens = tokens_of(family.arch, 2, LENGTH)
    with torch.no_grad():
        theirs = reference(input_ids=tokens).logits
    decoder = build_decoder(family.arch, dtype=dtype, device="cpu")
    decoder.load_state_dict(logical_weights(family.arch, reference.state_dict()), strict=not family.arch.tie_embeddings)
    return logits_of(decoder, tokens, rows_of(family.arch, 2, LENGTH, dtype=dtype)), theirs


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_at_every_position_in_float64(name: str) -> None:
    float64 = torch.float64
    with float32_means_float64():
        ours, theirs = both_logits(FAMILIES[name], float64)
    assert ours.dtype == theirs.dtype == float64
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().amax(dim=(0, 2)).max() <= 1e-10


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_in_float32(name: str) -> None:
    ours, theirs = both_logits(FAMILIES[name], torch.float32)
    assert ours.dtype == theirs.dtype == torch.float32
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp(min=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_stored_tensor_is_read_and_every_parameter_written_once(name: str) -> None:
    family = FAMILIES[name]
    parts = [part for stored in stored_tensors(family.arch) for part in stored.parts]
    assert sorted(parts) == sorted(dict(build_decoder(family.arch).named_parameters()))
    names = {stored.name for stored in stored_tensors(family.arch)}
    assert names == dict(build_reference(family, torch.float32).named_parameters()).keys()


def test_the_comparison_sees_a_wrong_stretch() -> None:
    """A test of the test: beyond the original context another scaling moves the logits by far more than the bar."""
    family = FAMILIES["llama, llama3"]
    wrong = replace(family, arch=replace(family.arch, rope=replace(YARN, attention_factor=1.0)))
    with float32_means_float64():
        ours, theirs = both_logits(wrong, torch.float64)
    assert (ours - theirs).abs().max() > 1e-3


def test_norm_and_activation_are_those_of_the_architecture() -> None:
    gelu = replace(LLAMA, norm=Norm.LAYER, activation=Activation.GELU)
    decoder = build_decoder(gelu)
    assert isinstance(decoder.head.norm, torch.nn.LayerNorm)
    assert [module.approximate for module in decoder.modules() if isinstance(module, torch.nn.GELU)] == ["none"] * 2
