"""JSON objects whose keys stand once: of a key with two values readers differ in which they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["once", "repeated"]


def repeated(pairs: Sequence[tuple[str, Any]]) -> str | None:
    """The first key that stands more than once; None where all stand once."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return name
        seen.add(name)
    return None


def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object, as json's `object_pairs_hook`. Raises ValueError for a key that stands twice."""
    if (name := repeated(pairs)) is not None:
        raise ValueError(f"key {name!r} stands twice")
    return dict(pairs)
