"""Weight names of published checkpoints beside those of the plain model, as data.

A stored tensor holds one or several logical tensors, one after the other along the output dim; GPT-2 stores its
linear weights as (in, out), everything else as (out, in).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from meshwright.arch.arch import Arch
from meshwright.arch.parameters import tensors


@dataclass(frozen=True, slots=True)
class Stored:
    """`name` in the checkpoint; `parts` are the logical tensors it holds, in order, one after the other along `dim`."""

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    dim: int = 0


_LLAMA = {
    "embedding.weight": "model.embed_tokens.weight",
    "head.norm": "model.norm",
    "head.weight": "lm_head.weight",
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
    "mlp.router": "mlp.gate",
}
_GPT2 = {
    "attention_norm": ("ln_1", ("attention_norm",)),
    "attention": ("attn.c_attn", ("attention.query", "attention.key", "attention.value")),
    "attention.output": ("attn.c_proj", ("attention.output",)),
    "mlp_norm": ("ln_2", ("mlp_norm",)),
    "mlp.up": ("mlp.c_fc", ("mlp.up",)),
    "mlp.down": ("mlp.c_proj", ("mlp.down",)),
}


def stored_tensors(arch: Arch) -> tuple[Stored, ...]:
    """What a checkpoint of `arch` holds; every logical tensor is a part of exactly one stored tensor."""
    return tuple(_gpt2(arch) if arch.family == "gpt2" else _llama(arch))


def _llama(arch: Arch) -> Iterator[Stored]:
    for tensor in tensors(arch):
        if not tensor.name.startswith("layers."):
            stem, leaf = tensor.name.rsplit(".", 1)
            yield Stored(_LLAMA.get(tensor.name) or f"{_LLAMA[stem]}.{leaf}", (tensor.name,))
            continue
        _, layer, path = tensor.name.split(".", 2)
        if path.startswith("mlp.experts."):
            yield from _experts(layer, path)
            continue
        stem, leaf = path.rsplit(".", 1)
        yield Stored(f"model.layers.{layer}.{_LLAMA[stem]}.{leaf}", (tensor.name,))


def _experts(layer: str, path: str) -> Iterator[Stored]:
    """All experts in one tensor; its gates and ups in another, of which the gates come first."""
    here, there = f"layers.{layer}.mlp.experts", f"model.layers.{layer}.mlp.experts"
    if path.endswith("gate"):
        yield Stored(f"{there}.gate_up_proj", (f"{here}.gate", f"{here}.up"), dim=1)
    elif path.endswith("down"):
        yield Stored(f"{there}.down_proj", (f"{here}.down",), dim=1)


def _gpt2(arch: Arch) -> Iterator[Stored]:
    yield Stored("transformer.wte.weight", ("embedding.weight",))
    yield Stored("transformer.wpe.weight", ("embedding.positions",))
    for layer in range(arch.layers):
        for name, parts in _GPT2.values():
            for leaf in ("weight", "bias"):
                yield Stored(
                    f"transformer.h.{layer}.{name}.{leaf}",
                    tuple(f"layers.{layer}.{part}.{leaf}" for part in parts),
                    transposed=leaf == "weight" and "norm" not in parts[0],
                )
    for leaf in ("weight", "bias"):
        yield Stored(f"transformer.ln_f.{leaf}", (f"head.norm.{leaf}",))
    if not arch.tie_embeddings:
        yield Stored("lm_head.weight", ("head.weight",))


def logical_weights(arch: Arch, checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors -> the plain model's, by name."""
    shapes = {tensor.name: tensor.shape for tensor in tensors(arch)}
    weights: dict[str, Tensor] = {}
    for stored in stored_tensors(arch):
        value = checkpoint[stored.name].T if stored.transposed else checkpoint[stored.name]
        sizes = [shapes[part][stored.dim] for part in stored.parts]
        weights.update(zip(stored.parts, value.split(sizes, stored.dim), strict=True))
    return weights
