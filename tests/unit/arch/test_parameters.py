"""Names, shapes and start values of logical tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshwright.arch.arch import Activation, Arch, Experts, Latent, Norm
from meshwright.arch.parameters import tensors, unit_tensors
from meshwright.arch.tensors import Init, LogicalAxis

LLAMA = Arch("llama", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=256)
GPT2 = replace(
    LLAMA,
    family="gpt2",
    kv_heads=4,
    norm=Norm.LAYER,
    activation=Activation.GELU_TANH,
    gated=False,
    rope=None,
    max_positions=32,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    tie_embeddings=True,
)


def names(arch: Arch, unit: int) -> list[str]:
    prefix = arch.unit_name(unit) + "."
    return [tensor.name.removeprefix(prefix) for tensor in unit_tensors(arch, unit)]


def test_a_llama_block_has_exactly_these_tensors_in_order_of_execution() -> None:
    assert names(LLAMA, 2) == [
        "attention_norm.weight",
        "attention.query.weight",
        "attention.key.weight",
        "attention.value.weight",
        "attention.output.weight",
        "mlp_norm.weight",
        "mlp.gate.weight",
        "mlp.up.weight",
        "mlp.down.weight",
    ]
    assert names(LLAMA, 0) == ["weight"]
    assert names(LLAMA, 3) == ["norm.weight", "weight"]


def test_a_gpt2_block_has_biases_everywhere_and_no_gate() -> None:
    assert names(GPT2, 1) == [
        f"{path}.{leaf}"
        for path in (
            "attention_norm",
            "attention.query",
            "attention.key",
            "attention.value",
            "attention.output",
            "mlp_norm",
            "mlp.up",
            "mlp.down",
        )
        for leaf in ("weight", "bias")
    ]
    assert names(GPT2, 0) == ["weight", "positions"]
    assert names(GPT2, 3) == ["norm.weight", "norm.bias"]


def test_a_routed_block_has_a_router_stacked_experts_and_a_shared_feed_forward() -> None:
    arch = replace(LLAMA, experts=Experts(count=8, active=2, ffn=48, shared=2, dense_layers=1))
    assert "mlp.gate.weight" in names(arch, 1)
    shapes = {tensor.name: (tensor.shape, tensor.axes) for tensor in unit_tensors(arch, 2)}
    router = shapes["layers.1.mlp.router.weight"]
    assert router == ((8, 64), (LogicalAxis.ROUTES, LogicalAxis.HIDDEN))
    assert shapes["layers.1.mlp.experts.gate"][0] == (8, 48, 64)
    assert shapes["layers.1.mlp.experts.up"][0] == (8, 48, 64)
    down = shapes["layers.1.mlp.experts.down"]
    assert down == ((8, 64, 48), (LogicalAxis.EXPERTS, LogicalAxis.HIDDEN, LogicalAxis.EXPERT_FFN))
    assert shapes["layers.1.mlp.shared.down.weight"] == ((64, 96), (LogicalAxis.HIDDEN, LogicalAxis.FFN))


def test_head_size_is_kept_where_it_is_not_hidden_over_heads() -> None:
    arch = replace(LLAMA, head_dim=32, qk_norm=True)
    shapes = {tensor.name: tensor.shape for tensor in tensors(arch)}
    assert shapes["layers.0.attention.query.weight"] == (128, 64)
    assert shapes["layers.0.attention.value.weight"] == (64, 64)
    assert shapes["layers.0.attention.output.weight"] == (64, 128)
    assert shapes["layers.0.attention.key_norm.weight"] == (32,)


def test_a_tied_embedding_is_read_by_the_head_and_owned_once() -> None:
    tied = replace(LLAMA, tie_embeddings=True)
    (embedding,) = [tensor for tensor in tensors(tied) if tensor.tied]
    assert (embedding.name, embedding.unit, embedding.readers) == ("embedding.weight", 0, (0, 3))
    assert sum(t.numel for t in tensors(LLAMA)) - sum(t.numel for t in tensors(tied)) == 256 * 64


def test_start_values() -> None:
    inits = {tensor.name: tensor.init for tensor in tensors(GPT2)}
    assert inits["layers.0.attention.query.weight"] == Init(std=0.02)
    assert inits["embedding.positions"] == Init(std=0.02)
    for residual in ("attention.output.weight", "mlp.down.weight"):
        assert inits[f"layers.1.{residual}"] == Init(std=0.02 / math.sqrt(4))
    assert inits["layers.0.mlp.down.bias"] == Init(constant=0.0)
    assert inits["layers.0.mlp_norm.weight"] == inits["head.norm.weight"] == Init(constant=1.0)
    routed = {t.name: t.init for t in tensors(replace(LLAMA, experts=Experts(4, 2, 32)))}
    assert routed["layers.0.mlp.experts.down"] == Init(std=0.01)


@pytest.mark.parametrize("arch", [LLAMA, GPT2, replace(LLAMA, experts=Experts(8, 2, 128, shared=1))])
def test_names_are_unique_and_units_are_in_order(arch: Arch) -> None:
    every = tensors(arch)
    assert len({tensor.name for tensor in every}) == len(every)
    assert [tensor.unit for tensor in every] == sorted(tensor.unit for tensor in every)
    assert all(len(tensor.shape) == len(tensor.axes) for tensor in every)


def test_latent_attention_compresses_queries_and_keys() -> None:
    latent = Latent(query_rank=24, kv_rank=16, content_dim=12, rope_dim=4, value_dim=10)
    arch = replace(LLAMA, kv_heads=4, latent=latent)
    shapes = {tensor.name.removeprefix("layers.0.attention."): tensor.shape for tensor in unit_tensors(arch, 1)}
    assert shapes["query_down.weight"] == (24, 64)
    assert shapes["query_up.weight"] == (4 * 16, 24)
    assert shapes["kv_down.weight"] == (16 + 4, 64)
    assert shapes["kv_up.weight"] == (4 * (12 + 10), 16)
    assert shapes["output.weight"] == (64, 4 * 10)


def test_alibi_needs_no_table_of_positions() -> None:
    arch = replace(GPT2, alibi=True, embedding_norm=True)
    assert names(arch, 0) == ["weight", "norm.weight", "norm.bias"]
