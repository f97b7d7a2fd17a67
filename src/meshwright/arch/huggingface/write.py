"""An `Arch` as the config.json of its family, for export."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from meshwright.arch.arch import Arch
from meshwright.arch.huggingface.dialects import ACTIVATIONS, DIALECTS, Dialect
from meshwright.arch.huggingface.read import ConfigWarning, arch_from_hf
from meshwright.arch.huggingface.rope import write_rope
from meshwright.config.choices import Family
from meshwright.config.errors import RequestError


def hf_config(arch: Arch) -> dict[str, Any]:
    """The content of a config.json that transformers builds `arch` from, with every derived size written out.

    It is read back before it is returned: raises RequestError, naming the fields, where the family's config.json
    cannot say what `arch` is. Dropout is said only by families that have a word for it.
    """
    family = Family(arch.family)
    dialect = DIALECTS[family]
    config: dict[str, Any] = {"model_type": str(family), "architectures": [dialect.model_class]}
    for name, value in _values(arch).items():
        if name in dialect.keys:
            config[dialect.keys[name][0]] = value
    if arch.rope is not None:
        config |= write_rope(arch.rope)
    config |= _windows(arch, dialect)
    if arch.experts is not None and arch.experts.dense_layers and "dense_layers" not in dialect.keys:
        config["mlp_only_layers"] = list(range(arch.experts.dense_layers))
    config[dialect.attention_dropout] = 0.0
    _check_said(arch, config)
    return config


def _values(arch: Arch) -> dict[str, Any]:
    activation = next(name for name, value in ACTIVATIONS.items() if value is arch.activation)
    values: dict[str, Any] = {
        "activation": activation,
        "attention_bias": arch.qkv_bias,
        "embedding_dropout": arch.dropout,
    }
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "norm_eps", "max_positions"):
        values[name] = getattr(arch, name)
    for name in ("tie_embeddings", "mlp_bias", "dropout"):
        values[name] = getattr(arch, name)
    if arch.experts is not None:
        experts = arch.experts
        values |= {"experts": experts.count, "active": experts.active, "expert_ffn": experts.ffn}
        values |= {"shared": experts.shared, "normalise": experts.normalise, "dense_layers": experts.dense_layers}
    return values | (dataclasses.asdict(arch.latent) if arch.latent else {})


def _windows(arch: Arch, dialect: Dialect) -> dict[str, Any]:
    if dialect.windows == "none":
        return {}
    config: dict[str, Any] = {"sliding_window": arch.sliding_window or None}
    if dialect.windows == "layers":
        kinds = ["sliding_attention" if arch.window(layer) else "full_attention" for layer in range(arch.layers)]
        config |= {"layer_types": kinds}
    if arch.family in (Family.QWEN2, Family.QWEN3, Family.QWEN3_MOE):
        config |= {"use_sliding_window": arch.sliding_window > 0}
    return config


def _check_said(arch: Arch, config: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        said = arch_from_hf(config)
    if arch.experts is not None and not arch.experts.dense_layers:  # no block has a dense feed-forward
        said = dataclasses.replace(said, ffn=arch.ffn)
    wanted = arch if "resid_pdrop" in config or "hidden_dropout" in config else dataclasses.replace(arch, dropout=0.0)
    differing = [
        field.name for field in dataclasses.fields(Arch) if getattr(said, field.name) != getattr(wanted, field.name)
    ]
    if differing:
        raise RequestError(f"a {arch.family} with its {', '.join(differing)}", "cannot be said in its config.json")
