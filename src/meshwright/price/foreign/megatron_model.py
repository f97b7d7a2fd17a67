"""The model in Megatron-LM's words, both ways. A family is known by the words that its template would be written in.

--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear       llama, mixtral, ...
(nothing: learned positions, LayerNorm, biases, gelu)                                       gpt2
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.arch.arch import Arch, Norm, RopeScaling
from meshwright.arch.checks import check_layers
from meshwright.arch.families import family_template
from meshwright.config.errors import RequestError
from meshwright.price.foreign.arguments import argument_number
from meshwright.price.foreign.dialect import Format, Keys, refuse, whole

__all__ = ["MODEL_ARGUMENTS", "model_words", "read_model", "whole_argument"]

MODEL_ARGUMENTS = {
    "num-layers": "model.layers", "hidden-size": "model.hidden", "num-attention-heads": "model.heads",
    "ffn-hidden-size": "model.ffn", "kv-channels": "model.head_dim", "vocab-size": "model.vocab",
    "rotary-base": "model.rope_theta", "norm-epsilon": "model.norm_eps", "num-experts": "model.experts",
    "moe-router-topk": "model.experts_per_token", "moe-ffn-hidden-size": "model.expert_ffn",
    "hidden-dropout": "model.dropout",
}  # fmt: skip
"""name -> our key; plain numbers."""

_FAMILIES = "llama", "gpt2", "bloom"
_ROUTED = {"llama": "mixtral"}
_USUAL = {"rotary-percent": ("1", "1.0"), "moe-router-score-function": ("softmax",), "softmax-type": ("vanilla",),
          "moe-layer-freq": ("1",)}  # fmt: skip
"""Values that change nothing."""

_OTHER = {
    "multi-latent-attention", "mtp-num-layers", "moe-router-pre-softmax", "moe-router-score-function",
    "moe-router-topk-scaling-factor", "moe-router-num-groups", "squared-relu", "rotary-percent", "window-size",
    "apply-residual-connection-post-layernorm", "softmax-type", "heterogeneous-layers-config-path",
    "hybrid-override-pattern", "experimental-attention-variant", "qk-l2-norm", "attention-output-gate",
    "glu-activation", "quick-geglu", "no-rope-freq", "num-experts-per-layer", "mrope-section", "encoder-num-layers",
    "decoder-num-layers", "multi-head-latent-attention", "kv-lora-rank",
    "n-shared-experts", "first-k-dense-replace", "moe-intermediate-size", "moe-router-use-gating-bias",
}  # fmt: skip
"""Words that make another model, which no key of ours is."""

_LLAMA3 = {"low": 1.0, "high": 4.0, "original_positions": 8192}  # fixed there
_FREQUENCY = re.compile(r"\(?\[0\]\*(\d{1,9})\+\[1\]\*(\d{1,9})\)?")
_ROUND = 64


def whole_argument(given: Mapping[str, str], name: str, default: int = 1) -> int:
    """The first word of an argument that is a whole number of at least 1."""
    if name not in given:
        return default
    number = argument_number(name, (given[name].split() or [""])[0])
    return whole(Format.MEGATRON, f"--{name}", number)


def read_model(given: Mapping[str, str], keys: Keys, notes: list[str]) -> None:
    """Add the keys of the model; none where the arguments hold no model. Raises RequestError."""
    if "num-layers" not in given:
        return
    for name in ("hidden-size", "num-attention-heads"):
        if name not in given:
            raise refuse(Format.MEGATRON, f"--{name}", "wants it beside --num-layers", (f"--{name} N",))
    check_layers(whole_argument(given, "num-layers"))
    for name in sorted(_OTHER & set(given)):
        if given[name] not in _USUAL.get(name, ()):
            raise refuse(Format.MEGATRON, f"--{name} {given[name]}".strip(), "makes another model of it, ours has none")
    family = _family(given)
    template, routed = family_template(family), whole_argument(given, "num-experts") > 1
    if not routed:  # one expert is none
        for key in ("experts", "experts_per_token", "expert_ffn"):
            keys.pop(f"model.{key}", None)
    if routed and family not in _ROUTED:
        raise refuse(Format.MEGATRON, "--num-experts", f"has experts in a model of family {family}, ours has none")
    keys["model.family"] = _ROUTED[family] if routed else family
    if routed and family == "llama" and "qk-layernorm" in given:
        keys["model.family"] = "qwen3_moe"
    elif family == "llama" and not routed:
        named = {"qk-layernorm": "qwen3", "add-qkv-bias": "qwen2"}
        keys["model.family"] = next((ours for name, ours in named.items() if name in given), family)
    family = keys["model.family"]
    for key, name in (("qk_norm", "qk-layernorm"), ("qkv_bias", "add-qkv-bias")):
        on = name in given or (key == "qkv_bias" and template.mlp_bias)
        if on is not getattr(family_template(family), key):
            keys[f"model.{key}"] = on
    keys["model.tie_embeddings"] = "untie-embeddings-and-output-weights" not in given
    grouped = "group-query-attention" in given
    keys["model.kv_heads"] = whole_argument(given, "num-query-groups") if grouped else keys["model.heads"]
    if "max-position-embeddings" in given:
        keys["model.max_positions"] = whole_argument(given, "max-position-embeddings")
    if "ffn-hidden-size" not in given:
        hidden = keys["model.hidden"]
        keys["model.ffn"] = int(4 * hidden * 2 / 3 / _ROUND) * _ROUND if template.gated else 4 * hidden
    _read_unsaid(given, keys, template)
    _read_experts(given, keys, notes)
    _read_vocabulary(given, keys, notes)


def _family(given: Mapping[str, str]) -> str:
    """The family whose template is written in these words. Raises RequestError."""
    wanted = set(_shape(given))
    for family in _FAMILIES:
        if wanted == set(_shape_words(family_template(family))):
            return family
    works = tuple(" ".join(sorted(_shape_words(family_template(family)))) for family in _FAMILIES)
    raise refuse(Format.MEGATRON, " ".join(sorted(wanted)), "makes a model of it that no family of ours is", works)


def _shape(given: Mapping[str, str]) -> Iterator[str]:
    position = given.get("position-embedding-type", "learned_absolute")
    if "use-rotary-position-embeddings" in given:
        position = "rope"
    yield f"--position-embedding-type {position}"
    yield f"--normalization {given.get('normalization', 'LayerNorm')}"
    yield from (f"--{name}" for name in ("swiglu", "disable-bias-linear", "embed-layernorm") if name in given)


def _shape_words(arch: Arch) -> Iterator[str]:
    position = "rope" if arch.rope else "alibi" if arch.alibi else "learned_absolute"
    yield f"--position-embedding-type {position}"
    yield f"--normalization {'RMSNorm' if arch.norm is Norm.RMS else 'LayerNorm'}"
    flags = {"swiglu": arch.gated, "disable-bias-linear": not arch.mlp_bias, "embed-layernorm": arch.embedding_norm}
    yield from (f"--{name}" for name, on in flags.items() if on)


def _read_unsaid(given: Mapping[str, str], keys: Keys, template: Arch) -> None:
    """What a model has there where nothing is said."""
    keys.setdefault("model.norm_eps", 1e-5)
    keys.setdefault("model.dropout", 0.1)
    if template.rope is None:
        keys.pop("model.rope_theta", None)
        return
    keys.setdefault("model.rope_theta", 10_000.0)
    if "use-rope-scaling" in given:
        factor = argument_number("rope-scaling-factor", given.get("rope-scaling-factor", "8.0"))
        keys["model.rope_scaling"] = {
            "kind": "llama3", "factor": float(factor), "original_max_positions": _LLAMA3["original_positions"],
            "low_frequency_factor": _LLAMA3["low"], "high_frequency_factor": _LLAMA3["high"],
        }  # fmt: skip


def _read_experts(given: Mapping[str, str], keys: Keys, notes: list[str]) -> None:
    if "model.experts" not in keys:
        return
    keys.setdefault("model.experts_per_token", 2)
    keys.setdefault("model.expert_ffn", keys["model.ffn"])
    keys.setdefault("moe.auxiliary_loss", 0.0)
    kind = given.get("moe-router-load-balancing-type", "aux_loss")
    if kind not in ("aux_loss", "seq_aux_loss", "none"):
        rule = "balances experts in a way that ours has not"
        raise refuse(Format.MEGATRON, f"--moe-router-load-balancing-type {kind}", rule, ("aux_loss", "seq_aux_loss"))
    if kind == "aux_loss" and keys["moe.auxiliary_loss"]:
        notes.append("--moe-router-load-balancing-type aux_loss: loads of a micro-batch there, of a sequence in ours")
    if kind == "none":
        keys |= {"moe.balance": "none", "moe.auxiliary_loss": 0.0}
    if "moe-router-enable-expert-bias" in given:
        if keys["moe.auxiliary_loss"]:
            rule = "has a bias and a loss at once, ours one of them"
            raise refuse(Format.MEGATRON, "--moe-router-enable-expert-bias", rule, ("--moe-aux-loss-coeff 0",))
        keys["moe.balance"] = "bias"
    if "moe-expert-capacity-factor" in given:
        keys["moe.capacity"] = argument_number("moe-expert-capacity-factor", given["moe-expert-capacity-factor"])
    if shared := given.get("moe-shared-expert-intermediate-size"):
        width = whole(Format.MEGATRON, "--moe-shared-expert-intermediate-size", argument_number("", shared))
        one = whole(Format.MEGATRON, "--moe-ffn-hidden-size", keys["model.expert_ffn"])
        if width % one:
            rule = f"shares an expert of that width, ours are as wide as the others, {one}"
            raise refuse(Format.MEGATRON, f"--moe-shared-expert-intermediate-size {width}", rule, (str(one),))
        keys["model.shared_experts"] = width // one
    frequency = given.get("moe-layer-freq", "1").replace(" ", "")
    if frequency != "1":
        found = _FREQUENCY.fullmatch(frequency)
        if found is None or int(found[1]) + int(found[2]) != keys["model.layers"]:
            rule = "has dense layers between those with experts, ours only before them"
            raise refuse(Format.MEGATRON, f"--moe-layer-freq {frequency}", rule, ("1", "([0]*1+[1]*26)"))
        keys["model.dense_layers"] = int(found[1])


def _read_vocabulary(given: Mapping[str, str], keys: Keys, notes: list[str]) -> None:
    if "pad-vocab-size-to" in given:
        keys["model.vocab"] = whole_argument(given, "pad-vocab-size-to")
        return
    if "vocab-size" not in given:
        notes.append("--vocab-size is the tokenizer's there: give model.vocab=N")
        return
    multiple = whole_argument(given, "make-vocab-size-divisible-by", 128)
    multiple *= whole_argument(given, "tensor-model-parallel-size")
    if whole_argument(given, "vocab-size") % multiple:
        notes.append(
            f"--vocab-size: there the table is padded to a multiple of {multiple}; ours has as many rows as told"
        )


def model_words(arch: Arch, sequence_length: int) -> Iterator[tuple[str, ...]]:
    """The model's arguments; what they cannot say is found when they are read back."""
    values: dict[str, Any] = {
        "num-layers": arch.layers, "hidden-size": arch.hidden, "num-attention-heads": arch.heads,
        "ffn-hidden-size": arch.ffn, "kv-channels": arch.head_dim, "vocab-size": arch.vocab,
        "norm-epsilon": arch.norm_eps, "hidden-dropout": arch.dropout, "attention-dropout": 0.0,
    }  # fmt: skip
    if arch.rope is not None:
        values["rotary-base"] = arch.rope.theta
    if arch.experts is not None:
        values |= {"num-experts": arch.experts.count, "moe-router-topk": arch.experts.active,
                   "moe-ffn-hidden-size": arch.experts.ffn}  # fmt: skip
        if arch.experts.shared:
            values["moe-shared-expert-intermediate-size"] = arch.experts.shared * arch.experts.ffn
        if dense := arch.experts.dense_layers:
            values["moe-layer-freq"] = f"'([0]*{dense}+[1]*{arch.layers - dense})'"
    for name, value in values.items():
        yield f"--{name}", repr(value) if isinstance(value, float) else str(value)
    if arch.kv_heads != arch.heads:
        yield "--group-query-attention", "--num-query-groups", str(arch.kv_heads)
    yield "--max-position-embeddings", str(arch.max_positions or sequence_length)
    yield from (tuple(word.split()) for word in _shape_words(arch))
    flags = {"qk-layernorm": arch.qk_norm, "add-qkv-bias": arch.qkv_bias and not arch.mlp_bias,
             "untie-embeddings-and-output-weights": not arch.tie_embeddings}  # fmt: skip
    yield from ((f"--{name}",) for name, on in flags.items() if on)
    rope = arch.rope
    if rope and rope.scaling is RopeScaling.LLAMA3 and all(getattr(rope, name) == x for name, x in _LLAMA3.items()):
        yield "--use-rope-scaling", "--rope-scaling-factor", repr(rope.factor)
    elif rope and rope.scaling is not RopeScaling.NONE:
        rule = "megatron has no such scaling of its gpt models"
        raise RequestError(f'model.rope_scaling.kind = "{rope.scaling.value}"', rule)
