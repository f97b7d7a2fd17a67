"""A number with its noun, as messages of every layer tell it."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """``1 mesh``, ``2 meshes``, ``1,024 micro-batches``."""
    plural = noun + ("es" if noun.endswith(("s", "h")) else "s")
    return f"{number:,} {noun if number == 1 else plural}"
