"""The tiny settings used all over the tests, as overrides of a run file.

M0: two layers, hidden 64, four query heads on two key/value heads, gated feed-forward of 128: small enough for a step
in milliseconds, large enough that every axis has something to cut and grouped-query attention is real.
"""

from typing import Any

M0_MODEL: dict[str, Any] = {
    "family": "llama",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 128,
    "vocab": 256,
}

M0_SEQUENCE_LENGTH = 32


def m0(**sections: dict[str, Any]) -> dict[str, Any]:
    """A run file (nested, as TOML reads it) of M0 with the seed fixed; `sections` replace single keys.

    m0(mesh={"dp": 4}, batch={"global": 8}) -> M0 with these two keys changed.
    """
    run: dict[str, Any] = {
        "name": "m0",
        "seed": 0,
        "model": dict(M0_MODEL),
        "data": {"sequence_length": M0_SEQUENCE_LENGTH},
        "mesh": {"dp": 1},
        "batch": {"global": 4, "micro": 1},
    }
    for section, keys in sections.items():
        run[section] = {**run.get(section, {}), **keys}
    return run


def m0_bytes(**sections: dict[str, Any]) -> dict[str, Any]:
    """M0 with the vocabulary of the byte tokenizer (257, not divisible by any degree: padding is real)."""
    return m0(**{**sections, "model": {"vocab": 257, **sections.get("model", {})}})


def overrides(run: dict[str, Any]) -> list[str]:
    """The same as command-line overrides: `section.key=value`, in order."""
    flat: list[str] = []
    for key, value in run.items():
        if isinstance(value, dict):
            flat += [f"{key}.{inner}={_toml(item)}" for inner, item in value.items()]
        else:
            flat.append(f"{key}={_toml(value)}")
    return flat


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else repr(value)
