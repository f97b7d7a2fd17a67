"""What an architecture may have that no module computes yet: it can be planned and priced, but not run."""

from __future__ import annotations

from meshwright.arch.arch import Arch

__all__ = ["lacking"]


def lacking(arch: Arch) -> list[str]:
    """The parts of `arch` that do not run, by name. A part that is built loses its line here."""
    parts = (
        ("latent attention", arch.latent),
        ("linear attention biases (ALiBi)", arch.alibi),
    )
    return [part for part, present in parts if present]
