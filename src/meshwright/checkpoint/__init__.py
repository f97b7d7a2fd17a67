"""Checkpoints: saved by any layout, continued by any other, checked at every step of the way.

manifest, container, writer    the format: JSON and safetensors, block digests, fingerprints
storage, folder                where it lies, and the order in which a folder changes
source, stream, boxes          reading along moves, in constant memory
subject: engine, module        what is saved: an engine, or a module under data_parallel
saver, loader, resume          their side of it
rewrite, check, huggingface    without an engine: other layouts, proofs, other programs' files
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.checkpoint.front import load, save

__all__ = ["load", "save"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from meshwright.checkpoint import front

        return getattr(front, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
