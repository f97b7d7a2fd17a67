"""How each family's config.json spells things: keys, what an absent key means, and what must stay at its default.

Source of keys and defaults: the configuration classes of transformers (5.x), class by class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.arch.arch import Activation
from meshwright.config.choices import Family

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}

_INERT = """
_attn_implementation _name_or_path architectures auto_map bos_token_id chunk_size_feed_forward dtype
eos_token_id finetuning_task gradient_checkpointing id2label initializer_range is_decoder is_encoder_decoder
label2id model_type n_ctx num_labels output_attentions output_hidden_states output_router_logits pad_token_id
prefix pretraining_tp problem_type quantization_config reorder_and_upcast_attn return_dict router_aux_loss_coef
sep_token_id summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
task_specific_params tokenizer_class torch_dtype transformers_version use_cache attention_softmax_in_fp32
bias_dropout_fusion masked_softmax_fusion offset_alibi skip_bias_add skip_bias_add_qkv slow_but_exact unk_token_id
"""
INERT = frozenset(_INERT.split())
"""Keys that do not change what the decoder computes (initialisation, tokens, storage, library bookkeeping)."""

NULL_SPEAKS = frozenset(("kv_heads", "query_rank"))
"""Our names of keys whose null says something: as many as query heads, no low rank. Absent they mean the default."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One family's spelling.

    `keys`      our name -> config keys, the one to write first
    `absent`    our name -> what an absent (or null) key means; a size that has no entry is required
    `only`      config key -> the one value whose meaning is built; any other is refused by name
    `windows`   where sliding windows are said: "none", "all" (one key, every layer), "layers" (which layers as well)
    """

    model_class: str
    keys: Mapping[str, tuple[str, ...]]
    absent: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    windows: str = "none"
    attention_dropout: str = "attention_dropout"


_DECODER: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size",),
    "vocab": ("vocab_size",),
    "norm_eps": ("rms_norm_eps",),
    "max_positions": ("max_position_embeddings",),
    "tie_embeddings": ("tie_word_embeddings",),
    "activation": ("hidden_act",),
}
_DECODER_ABSENT: Mapping[str, Any] = {
    "norm_eps": 1e-6,
    "tie_embeddings": False,
    "activation": "silu",
    "rope_theta": 10_000.0,
}
_BIAS = {"attention_bias": ("attention_bias",)}
_QWEN_EXPERTS = {
    "experts": ("num_experts", "num_local_experts"),
    "active": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size",),
    "normalise": ("norm_topk_prob",),
}

DIALECTS: Mapping[Family, Dialect] = {
    Family.LLAMA: Dialect(
        "LlamaForCausalLM",
        {**_DECODER, **_BIAS, "mlp_bias": ("mlp_bias",)},
        {**_DECODER_ABSENT, "max_positions": 2048},
    ),
    Family.MISTRAL: Dialect(
        "MistralForCausalLM",
        _DECODER,
        {**_DECODER_ABSENT, "kv_heads": 8, "max_positions": 131_072, "sliding_window": 4096},
        windows="all",
    ),
    Family.QWEN2: Dialect(
        "Qwen2ForCausalLM",
        _DECODER,
        {**_DECODER_ABSENT, "kv_heads": 32, "max_positions": 32_768},
        windows="layers",
    ),
    Family.QWEN3: Dialect(
        "Qwen3ForCausalLM",
        {**_DECODER, **_BIAS},
        {**_DECODER_ABSENT, "kv_heads": 32, "max_positions": 32_768, "head_dim": 128},
        windows="layers",
    ),
    Family.MIXTRAL: Dialect(
        "MixtralForCausalLM",
        {
            **_DECODER,
            "experts": ("num_local_experts", "num_experts"),
            "active": ("num_experts_per_tok",),
            "expert_ffn": ("intermediate_size",),
        },
        {**_DECODER_ABSENT, "kv_heads": 8, "norm_eps": 1e-5, "max_positions": 131_072, "rope_theta": 1_000_000.0},
        {"router_jitter_noise": 0.0},
        windows="all",
    ),
    Family.QWEN3_MOE: Dialect(
        "Qwen3MoeForCausalLM",
        {**_DECODER, **_BIAS, **_QWEN_EXPERTS},
        {**_DECODER_ABSENT, "kv_heads": 4, "max_positions": 32_768, "normalise": False},
        {"decoder_sparse_step": 1},
        windows="all",
    ),
    Family.GPT2: Dialect(
        "GPT2LMHeadModel",
        {
            "layers": ("n_layer", "num_hidden_layers"),
            "hidden": ("n_embd", "hidden_size"),
            "heads": ("n_head", "num_attention_heads"),
            "ffn": ("n_inner",),
            "vocab": ("vocab_size",),
            "norm_eps": ("layer_norm_epsilon",),
            "max_positions": ("n_positions", "max_position_embeddings"),
            "tie_embeddings": ("tie_word_embeddings",),
            "activation": ("activation_function",),
            "dropout": ("resid_pdrop",),
            "embedding_dropout": ("embd_pdrop",),
        },
        {
            "norm_eps": 1e-5,
            "tie_embeddings": True,
            "activation": "gelu_new",
            "dropout": 0.1,
            "embedding_dropout": 0.1,
            "attention_dropout": 0.1,
        },
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        attention_dropout="attn_pdrop",
    ),
    Family.BLOOM: Dialect(
        "BloomForCausalLM",
        {
            "layers": ("n_layer", "num_hidden_layers"),
            "hidden": ("hidden_size", "n_embed"),
            "heads": ("n_head", "num_attention_heads"),
            "vocab": ("vocab_size",),
            "norm_eps": ("layer_norm_epsilon",),
            "max_positions": ("seq_length",),
            "tie_embeddings": ("tie_word_embeddings",),
            "dropout": ("hidden_dropout",),
        },
        {"norm_eps": 1e-5, "tie_embeddings": True, "dropout": 0.0, "max_positions": 0},
        {"apply_residual_connection_post_layernorm": False},
    ),
    Family.DEEPSEEK_V3: Dialect(
        "DeepseekV3ForCausalLM",
        {
            **{name: keys for name, keys in _DECODER.items() if name not in ("kv_heads", "head_dim")},
            **_BIAS,
            "experts": ("n_routed_experts", "num_local_experts"),
            "active": ("num_experts_per_tok",),
            "expert_ffn": ("moe_intermediate_size",),
            "shared": ("n_shared_experts",),
            "dense_layers": ("first_k_dense_replace",),
            "normalise": ("norm_topk_prob",),
            "query_rank": ("q_lora_rank",),
            "kv_rank": ("kv_lora_rank",),
            "content_dim": ("qk_nope_head_dim",),
            "rope_dim": ("qk_rope_head_dim",),
            "value_dim": ("v_head_dim",),
        },
        {
            **_DECODER_ABSENT,
            "max_positions": 4096,
            "shared": 1,
            "dense_layers": 3,
            "normalise": True,
            "query_rank": 1536,
        },
        {"moe_layer_freq": 1},
    ),
}

_DEEPSEEK = """
num_key_value_heads head_dim qk_head_dim n_group topk_group topk_method scoring_func routed_scaling_factor
rope_interleave num_nextn_predict_layers num_mtp_layers aux_loss_alpha seq_aux ep_size
"""
SHAPE_KEYS: Mapping[Family, frozenset[str]] = {
    Family.DEEPSEEK_V3: frozenset(_DEEPSEEK.split()),
}
"""Keys that change what a family computes but not its shape; such a family is priced, not run."""
