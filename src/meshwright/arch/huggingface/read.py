"""A config.json as an `Arch`. What is not built is refused by name; what has no effect here is told."""

from __future__ import annotations

import dataclasses
import difflib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.arch.arch import Arch, Experts, Latent
from meshwright.arch.checks import check_arch, check_layers
from meshwright.arch.families import FAMILIES
from meshwright.arch.huggingface.dialects import ACTIVATIONS, DIALECTS, INERT, NULL_SPEAKS, SHAPE_KEYS, Dialect
from meshwright.arch.huggingface.rope import read_rope
from meshwright.arch.huggingface.values import check_values
from meshwright.config.choices import Family
from meshwright.config.errors import RequestError
from meshwright.config.once import once

_HANDLED = """
rope_theta rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings sliding_window
use_sliding_window max_window_layers layer_types mlp_only_layers attention_dropout attn_pdrop
"""


class ConfigWarning(UserWarning):
    """Something in a foreign configuration has no effect here, or another effect than its author may expect."""


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """The content of `path`, a config.json or a folder that holds one.

    Raises RequestError where there is none, or where it is not a JSON object.
    """
    try:
        file = Path(path).expanduser()
        file = file / "config.json" if file.is_dir() else file
        content = file.read_bytes() if file.is_file() else None
    except (OSError, RuntimeError) as error:  # a name too long, a home that is nobody's
        raise RequestError(f'model.hf = "{path}"', f"cannot be read: {_reason(error)}") from None
    if content is None:
        raise RequestError(f'model.hf = "{path}"', "is neither a config.json nor a folder that holds one")
    try:
        config = json.loads(content, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise RequestError(str(file), f"is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise RequestError(str(file), "is not a JSON object")
    return config


def _reason(error: OSError | RuntimeError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def arch_from_hf(config: Mapping[str, Any]) -> Arch:
    """The decoder that a Hugging Face configuration describes, as transformers would build it.

    Raises RequestError for an unknown model_type, a missing size or a feature that is not built, by name. Warns
    (ConfigWarning) of dropout inside attention probabilities, which is never done, and of keys that nobody knows.
    """
    family = _family(config)
    reader = _Reader(config, family, DIALECTS[family])
    check_values(config, reader.dialect)
    reader.check_supported()
    template = FAMILIES[family]
    heads, hidden, layers = reader.size("heads"), reader.size("hidden"), reader.size("layers")
    check_layers(layers)  # windows are told layer by layer
    latent = reader.latent() if family is Family.DEEPSEEK_V3 else None
    window, windowed = reader.windows(layers)
    max_positions = reader.size("max_positions")
    output_bias = bool(reader.value("attention_bias", template.output_bias))
    arch = dataclasses.replace(
        template,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=reader.value("kv_heads", heads),
        head_dim=reader.head_dim(hidden, heads, latent),
        ffn=reader.value("ffn", 4 * hidden) if template.rope is None else reader.size("ffn"),
        vocab=reader.size("vocab"),
        norm_eps=float(reader.size("norm_eps")),
        activation=reader.activation(template),
        rope=template.rope and read_rope(config, reader.value("rope_theta"), max_positions),
        max_positions=max_positions,
        sliding_window=window,
        windowed_layers=windowed,
        qkv_bias=bool(reader.value("attention_bias", template.qkv_bias)),
        output_bias=output_bias,
        mlp_bias=bool(reader.value("mlp_bias", template.mlp_bias)),
        tie_embeddings=bool(reader.size("tie_embeddings")),
        experts=reader.experts(layers) if template.experts else None,
        latent=latent,
        dropout=float(reader.dropout()),
    )
    check_arch(arch)
    return arch


def _family(config: Mapping[str, Any]) -> Family:
    name = config.get("model_type")
    if not isinstance(name, str) or name not in set(Family):
        near = difflib.get_close_matches(str(name), list(Family), n=3)
        rest = [family for family in Family if family not in near]
        raise RequestError(f'model_type = "{name}"', "is not a family known here", [*near, *rest])
    return Family(name)


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """A config.json through the eyes of its dialect."""

    config: Mapping[str, Any]
    family: Family
    dialect: Dialect

    def value(self, name: str, otherwise: Any = None) -> Any:
        """What the config says of `name`; where it is silent or null, what that means; at last `otherwise`."""
        said = [self.config[key] for key in self.dialect.keys.get(name, ()) if key in self.config]
        given = next((each for each in said if each is not None), None)
        if given is not None or (said and name in NULL_SPEAKS):
            return otherwise if given is None else given
        return self.dialect.absent.get(name, otherwise)

    def size(self, name: str) -> Any:
        """A value that must be there."""
        value = self.value(name)
        if value is None:
            raise RequestError("config.json", f'has no "{self.dialect.keys[name][0]}", which {self.family} needs')
        return value

    def check_supported(self) -> None:
        """Refuse what is not built; tell what is not known."""
        for model_class in self.config.get("architectures") or ():
            if not model_class.endswith(("ForCausalLM", "LMHeadModel", "Model")):
                raise RequestError(f'architectures = ["{model_class}"]', "is not a causal language model")
        for key, built in self.dialect.only.items():
            if (value := self.config.get(key)) not in (None, built):
                raise RequestError(f"{key} = {json.dumps(value)}", "is not built", (json.dumps(built),))
        probability = self.config.get(self.dialect.attention_dropout, self.dialect.absent.get("attention_dropout"))
        if probability:
            self._tell(
                f"{self.dialect.attention_dropout} = {probability}: dropout is never applied inside attention "
                "probabilities here; its sites are embedding, attention output and MLP output"
            )
        known = {key for keys in self.dialect.keys.values() for key in keys} | set(self.dialect.only)
        known |= INERT | SHAPE_KEYS.get(self.family, frozenset()) | set(_HANDLED.split())
        unknown = [key for key in self.config if key not in known]
        if unknown:
            self._tell(f"keys without effect on {self.family}: {', '.join(unknown)}")

    def head_dim(self, hidden: int, heads: int, latent: Latent | None) -> int:
        if latent is not None:
            return latent.content_dim + latent.rope_dim
        given: int | None = self.value("head_dim")
        if given is None and (heads < 1 or hidden % heads):
            raise RequestError("config.json", f"has no head_dim, and {heads} heads do not divide hidden size {hidden}")
        return hidden // heads if given is None else given

    def activation(self, template: Arch) -> Any:
        name = self.value("activation")
        if name is None:
            return template.activation
        if name not in ACTIVATIONS:
            raise RequestError(f'{self.dialect.keys["activation"][0]} = "{name}"', "is not built", list(ACTIVATIONS))
        return ACTIVATIONS[name]

    def dropout(self) -> float:
        dropout: float = self.value("dropout", 0.0)
        embedding: float = self.value("embedding_dropout", dropout)
        if embedding != dropout:
            raise RequestError(
                f"embd_pdrop = {embedding} with resid_pdrop = {dropout}",
                "one dropout serves the embedding, attention output and MLP output",
                (f"both {dropout}", f"both {embedding}"),
            )
        return dropout

    def windows(self, layers: int) -> tuple[int, tuple[int, ...]]:
        """The sliding window and the layers it holds for, () for all; (0, ()) where nothing slides."""
        window = self.config.get("sliding_window", self.dialect.absent.get("sliding_window", 4096)) or 0
        kinds = self.config.get("layer_types")
        if unknown := sorted(set(kinds or ()) - {"full_attention", "sliding_attention"}):
            raise RequestError(f'layer_types: "{unknown[0]}"', "is not built", ("full_attention", "sliding_attention"))
        match self.dialect.windows:
            case "none":
                if self.config.get("sliding_window") or "sliding_attention" in (kinds or ()):
                    raise RequestError("sliding_window", f"has no meaning in model_type {self.family}", ("mistral",))
                return 0, ()
            case "all":
                return self._uniform_window(window, kinds)
            case _:
                return self._window_by_layer(window, kinds, layers)

    def _uniform_window(self, window: int, kinds: list[str] | None) -> tuple[int, tuple[int, ...]]:
        """mistral says it by sliding_window alone, mixtral too (absent: none), qwen3_moe has a switch as well."""
        if self.family is Family.MIXTRAL and self.config.get("sliding_window") is None:
            window = 0
        if self.family is Family.QWEN3_MOE and not self.config.get("use_sliding_window", False):
            window = 0
        expected = "sliding_attention" if window else "full_attention"
        if kinds is not None and any(kind != expected for kind in kinds):
            raise RequestError("layer_types", f"of {self.family} must all be {expected} with this sliding_window")
        return window, ()

    def _window_by_layer(self, window: int, kinds: list[str] | None, layers: int) -> tuple[int, tuple[int, ...]]:
        if not self.config.get("use_sliding_window", False):
            window = 0
        if kinds is None:
            first = self.config.get("max_window_layers", 28)
            kinds = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(layers)]
        if len(kinds) != layers:
            raise RequestError("layer_types", f"has {len(kinds)} entries for {layers} layers")
        sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
        if sliding and not window:
            raise RequestError("layer_types", "has sliding layers without a sliding_window and use_sliding_window")
        if not sliding:
            return 0, ()
        return window, () if len(sliding) == layers else sliding

    def experts(self, layers: int) -> Experts:
        return Experts(
            count=self.size("experts"),
            active=self.size("active"),
            ffn=self.size("expert_ffn"),
            shared=self.value("shared", 0),
            normalise=bool(self.value("normalise", True)),
            dense_layers=min(self._dense_layers(), layers),
        )

    def _dense_layers(self) -> int:
        dense = sorted(self.config.get("mlp_only_layers") or ())
        if dense and dense != list(range(len(dense))):
            raise RequestError(
                f"mlp_only_layers = {dense}", "dense layers are built at the beginning only", (list(range(len(dense))),)
            )
        return len(dense) if dense else int(self.value("dense_layers", 0))

    def latent(self) -> Latent:
        names = ("kv_rank", "content_dim", "rope_dim", "value_dim")
        return Latent(query_rank=self.value("query_rank", 0), **{name: self.size(name) for name in names})

    def _tell(self, message: str) -> None:
        warnings.warn(message, ConfigWarning, stacklevel=4)
