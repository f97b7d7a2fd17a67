"""The looks that all pages share, as one sheet."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["style"]

_SHEETS = ("colours", "page", "table", "figures", "print")


def style() -> str:
    """The style sheet, later rules over earlier ones."""
    folder = files("meshwright.report") / "page" / "style"
    return "".join((folder / f"{name}.css").read_text(encoding="utf-8") for name in _SHEETS)
