"""The tensors of published checkpoints beside the logical ones, as data.

Most are one to one. GPT-2 stores linear weights as (in, out) and query, key and value in one; experts are stored one by
one where here they are one tensor. Source of names: the modelling files of transformers (5.x), class by class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.arch.arch import Arch
from meshwright.arch.parameters import tensors
from meshwright.arch.tensors import Tensor
from meshwright.checkpoint.boxes import Part
from meshwright.config.choices import Family
from meshwright.config.errors import RequestError
from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import Rectangle, full

__all__ = ["BASE_PREFIX", "CARRIED", "HFTensor", "hf_tensors", "is_bookkeeping"]

CARRIED = (Family.LLAMA, Family.MISTRAL, Family.QWEN2, Family.QWEN3, Family.GPT2, Family.MIXTRAL, Family.QWEN3_MOE)
"""Families whose weights are imported and exported; the others are planned and priced only."""
BASE_PREFIX: Mapping[Family, str] = {
    family: "transformer." if family is Family.GPT2 else "model." for family in CARRIED
}
"""What the base model's names lack."""


@dataclass(frozen=True, slots=True)
class HFTensor:
    """`name` and `shape` in the file; `box` is the shape with leading dims of 1 where a part needs them."""

    name: str
    shape: tuple[int, ...]
    box: tuple[int, ...]
    parts: tuple[Part, ...]


_LLAMA = {
    "embedding": "model.embed_tokens",
    "head.norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_EXPERTS = {
    Family.MIXTRAL: ("block_sparse_moe.gate", "block_sparse_moe.experts", {"gate": "w1", "down": "w2", "up": "w3"}),
    Family.QWEN3_MOE: ("mlp.gate", "mlp.experts", {"gate": "gate_proj", "down": "down_proj", "up": "up_proj"}),
}
_GPT2 = (
    ("ln_1", ("attention_norm",)),
    ("attn.c_attn", ("attention.query", "attention.key", "attention.value")),
    ("attn.c_proj", ("attention.output",)),
    ("ln_2", ("mlp_norm",)),
    ("mlp.c_fc", ("mlp.up",)),
    ("mlp.c_proj", ("mlp.down",)),
)
_BOOKKEEPING = tuple(f"rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached"))
_BOOKKEEPING += ("attn.bias", "attn.masked_bias")


def hf_tensors(arch: Arch) -> tuple[HFTensor, ...]:
    """What a published checkpoint of `arch` holds, in order of execution; every logical element once.

    Raises RequestError for a family whose weights are not carried.
    """
    family = Family(arch.family)
    if family not in CARRIED:
        raise RequestError(f'model_type = "{family}"', "has no import and export of weights yet", CARRIED)
    if family is Family.GPT2:
        return tuple(_gpt2(arch))
    return tuple(found for tensor in tensors(arch) for found in _llama(family, tensor))


def is_bookkeeping(name: str) -> bool:
    """Buffers that old files hold beside the weights: masks and rotary tables."""
    return name.endswith(_BOOKKEEPING)


def _llama(family: Family, tensor: Tensor) -> Iterator[HFTensor]:
    stem, _, leaf = tensor.name.rpartition(".")
    if not stem.startswith("layers."):
        yield _same(f"{_LLAMA[stem]}.{leaf}", tensor)
        return
    _, layer, path = stem.split(".", 2)
    if path == "mlp.experts":
        _, folder, names = _EXPERTS[family]
        for expert in range(tensor.shape[0]):
            yield _expert(f"model.layers.{layer}.{folder}.{expert}.{names[leaf]}.weight", tensor, expert)
    elif path == "mlp.router":
        yield _same(f"model.layers.{layer}.{_EXPERTS[family][0]}.{leaf}", tensor)
    else:
        yield _same(f"model.layers.{layer}.{_LLAMA[path]}.{leaf}", tensor)


def _same(name: str, tensor: Tensor) -> HFTensor:
    return HFTensor(name, tensor.shape, tensor.shape, (Part.plain(Piece(tensor.name, full(tensor.shape))),))


def _expert(name: str, tensor: Tensor, expert: int) -> HFTensor:
    """One expert of the tensor of all of them."""
    inner = tensor.shape[1:]
    rectangle = Rectangle((expert, *(0 for _ in inner)), (1, *inner))
    return HFTensor(name, inner, (1, *inner), (Part.plain(Piece(tensor.name, rectangle)),))


def _gpt2(arch: Arch) -> Iterator[HFTensor]:
    known = {tensor.name: tensor for tensor in tensors(arch)}
    yield _same("transformer.wte.weight", known["embedding.weight"])
    yield _same("transformer.wpe.weight", known["embedding.positions"])
    for layer in range(arch.layers):
        for name, paths in _GPT2:
            for leaf in ("weight", "bias"):
                parts = [known[f"layers.{layer}.{path}.{leaf}"] for path in paths]
                yield _joined(f"transformer.h.{layer}.{name}.{leaf}", parts)
    for leaf in ("weight", "bias"):
        yield _same(f"transformer.ln_f.{leaf}", known[f"head.norm.{leaf}"])
    if not arch.tie_embeddings:
        yield _same("lm_head.weight", known["head.weight"])


def _joined(name: str, parts: list[Tensor]) -> HFTensor:
    """Tensors one after the other along their outputs; matrices are stored as (in, out)."""
    matrices = len(parts[0].shape) == 2
    outputs = sum(part.shape[0] for part in parts)
    shape = (parts[0].shape[1], outputs) if matrices else (outputs,)
    found, first = [], 0
    for part in parts:
        corner = (0, first) if matrices else (first,)
        found.append(Part(Piece(part.name, full(part.shape)), corner, (1, 0) if matrices else (0,)))
        first += part.shape[0]
    return HFTensor(name, shape, shape, tuple(found))
