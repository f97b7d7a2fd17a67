"""Rotary positions in config.json: the old spelling (rope_theta, rope_scaling) and the new (rope_parameters)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.arch.arch import Rope, RopeScaling
from meshwright.config.errors import RequestError

_KEYS: Mapping[str, str] = {
    "factor": "factor",
    "original_max_position_embeddings": "original_positions",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
_USED: Mapping[RopeScaling, tuple[str, ...]] = {
    RopeScaling.NONE: (),
    RopeScaling.LINEAR: ("factor",),
    RopeScaling.LLAMA3: ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    RopeScaling.YARN: (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
_REQUIRED: Mapping[RopeScaling, tuple[str, ...]] = {
    RopeScaling.NONE: (),
    RopeScaling.LINEAR: ("factor",),
    RopeScaling.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor"),
    RopeScaling.YARN: (),
}
_TYPES: Mapping[str, RopeScaling] = {"default": RopeScaling.NONE} | {
    str(kind): kind for kind in RopeScaling if kind is not RopeScaling.NONE
}
_COMMON = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"))


def read_rope(config: Mapping[str, Any], default_theta: float, max_positions: int) -> Rope:
    """The rotary positions that `config` describes, in either spelling.

    An absent original context is `max_positions`, and yarn's absent factor is their ratio, as in transformers.
    Raises RequestError for kinds and keys that are not built, by name.
    """
    parameters = _parameters(config)
    if (rotated := parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))) not in (None, 1):
        raise RequestError(f"partial_rotary_factor = {rotated}", "rotating a part of a head is not built", (1.0,))
    name = parameters.get("rope_type", parameters.get("type", "default"))
    if name not in _TYPES:
        raise RequestError(f'rope type "{name}"', "is not built", list(_TYPES))
    kind = _TYPES[name]
    if unknown := sorted(set(parameters) - _COMMON - set(_USED[kind])):
        raise RequestError(f"rope parameter {unknown[0]}", f'has no meaning in rope type "{name}"', _USED[kind])
    if missing := [key for key in _REQUIRED[kind] if parameters.get(key) is None]:
        raise RequestError(f'rope type "{name}"', f"needs {', '.join(missing)} as well")
    values = {_KEYS[key]: parameters[key] for key in _USED[kind] if parameters.get(key) is not None}
    if "original_max_position_embeddings" in _USED[kind]:
        stated = config.get("original_max_position_embeddings")
        original = values.setdefault("original_positions", max_positions if stated is None else stated)
        if original < 1:
            raise RequestError(f"original_max_position_embeddings = {original}", "must be at least 1")
        values.setdefault("factor", max_positions / original)
    theta = next((t for t in (parameters.get("rope_theta"), config.get("rope_theta")) if t is not None), default_theta)
    return Rope(theta=float(theta), scaling=kind, **values)


def write_rope(rope: Rope) -> dict[str, Any]:
    """`rope` in the old spelling, which every reader knows."""
    scaling: dict[str, Any] | None = None
    if rope.scaling is not RopeScaling.NONE:
        unset = Rope()
        values = {key: getattr(rope, _KEYS[key]) for key in _USED[rope.scaling]}
        always = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        scaling = {"rope_type": str(rope.scaling)} | {
            key: value for key, value in values.items() if key in always or value != getattr(unset, _KEYS[key])
        }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    new = dict(config.get("rope_parameters") or {})
    old = dict(config.get("rope_scaling") or {})
    nested = [value for value in new.values() if isinstance(value, Mapping)]
    if nested:
        if len(nested) < len(new) or any(value != nested[0] for value in nested):
            raise RequestError(
                "rope_parameters", "differ by kind of layer, which is not built", ("one for all layers",)
            )
        new = dict(nested[0])
    for key in sorted(set(new) & set(old)):
        if new[key] != old[key]:
            raise RequestError(
                f"rope_scaling.{key} = {old[key]}", f"contradicts rope_parameters.{key} = {new[key]}", ("only one",)
            )
    return new | old
