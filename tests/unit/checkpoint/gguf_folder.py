"""A quantised GGUF model as a Hugging Face folder: how the one pretrained model that a package ships comes in.

GGUF stores the rows of query and key projections of llamas in pairs (element f beside f + K/2); published safetensors
keep the halves apart. Source: the conversion script of llama.cpp, `LlamaModel.permute`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_hf_folder(file: Path, folder: Path) -> None:
    """config.json, model.safetensors (float32), tokenizer.json and tokenizer_config.json of a llama in `file`."""
    import gguf

    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir(parents=True)
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    weights = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        value = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if ".q_proj" in name or ".k_proj" in name:
            value = _halves(value, heads if ".q_proj" in name else kv_heads)
        weights[name] = torch.from_numpy(np.ascontiguousarray(value))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": fields["llama.embedding_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": fields["llama.feed_forward_length"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "max_position_embeddings": fields["llama.context_length"],
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(fields, folder)


def _hf_name(name: str) -> str:
    stem, leaf = name.rsplit(".", 1)
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{leaf}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_INNER[part]}.{leaf}"


def _halves(value: np.ndarray, heads: int) -> np.ndarray:
    """(H * K, D) rows in pairs -> rows in halves."""
    return value.reshape(heads, -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytewise])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokens[fields["tokenizer.ggml.eos_token_id"]]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "model_max_length": 8192}))
