"""Libraries that only some sources and tokenizers need."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from meshwright.config.errors import RequestError


def import_extra(module: str, needed_by: Path | str) -> ModuleType:
    """The module, or a RequestError that says how to install it."""
    try:
        return import_module(module)
    except ImportError:
        library = module.partition(".")[0]
        rule = f"needs the library {library}, which is not installed"
        raise RequestError(str(needed_by), rule, ['pip install "meshwright[data]"']) from None
