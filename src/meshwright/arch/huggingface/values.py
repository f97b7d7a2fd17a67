"""Which JSON values the keys of a config.json may have: a file of other programs may hold anything.

A number in quotes or "false" for a switch would be taken for something else without a word. `null` is silence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.arch.huggingface.dialects import Dialect
from meshwright.config.errors import RequestError


@dataclass(frozen=True, slots=True)
class _Kind:
    """`rule` as a clause, and the test for it."""

    rule: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    """NaN and infinities are none; neither is a whole number that no float holds."""
    most = sys.float_info.max
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -most <= value <= most


_NUMBER = _Kind("must be a number", _is_number)
_WHOLE = _Kind("must be a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool))
_SWITCH = _Kind("must be true or false", lambda value: isinstance(value, bool))
_TEXT = _Kind("must be text", lambda value: isinstance(value, str))
_OBJECT = _Kind("must be an object", lambda value: isinstance(value, Mapping))


def _list_of(kind: _Kind, what: str) -> _Kind:
    return _Kind(
        f"must be a list of {what}", lambda value: isinstance(value, list) and all(kind.holds(each) for each in value)
    )


_OURS: Mapping[str, _Kind] = {
    **dict.fromkeys(("norm_eps", "dropout", "embedding_dropout"), _NUMBER),
    **dict.fromkeys(("tie_embeddings", "attention_bias", "mlp_bias", "normalise"), _SWITCH),
    "activation": _TEXT,
}
"""By our names for what a dialect's keys say; all others are sizes."""
_THEIRS: Mapping[str, _Kind] = {
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "attention_dropout", "attn_pdrop"), _NUMBER),
    **dict.fromkeys(("original_max_position_embeddings", "sliding_window", "max_window_layers"), _WHOLE),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _OBJECT),
    "use_sliding_window": _SWITCH,
    "layer_types": _list_of(_TEXT, "texts"),
    "mlp_only_layers": _list_of(_WHOLE, "whole numbers"),
    "architectures": _list_of(_TEXT, "texts"),
}
"""By their own names, whatever the dialect."""
_ROPE: Mapping[str, _Kind] = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor"), _NUMBER),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"), _NUMBER),
    "original_max_position_embeddings": _WHOLE,
    "truncate": _SWITCH,
}
"""Inside `rope_scaling` and `rope_parameters`."""


def check_values(config: Mapping[str, Any], dialect: Dialect) -> None:
    """Raise RequestError for the first key that is read and whose value is of another kind."""
    kinds = {key: _OURS.get(name, _WHOLE) for name, keys in dialect.keys.items() for key in keys} | dict(_THEIRS)
    _check(config, kinds, "")
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key) or {}
        _check(rope, _ROPE, f"{key}.")
        for name, inner in rope.items():  # they may stand once for every kind of layer
            if isinstance(inner, Mapping):
                _check(inner, _ROPE, f"{key}.{name}.")


def _check(values: Mapping[str, Any], kinds: Mapping[str, _Kind], place: str) -> None:
    for key, value in values.items():
        kind = kinds.get(key)
        if kind is not None and value is not None and not kind.holds(value):
            raise RequestError(f"config.json: {place}{key} = {value!r:.60}", kind.rule)
