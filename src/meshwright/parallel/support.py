"""What a plan may ask for that no executor does yet: refused when the engine is built, never left out in silence."""

from __future__ import annotations

from meshwright.plan.plan import Plan
from meshwright.plan.strategies.expert import check_runs
from meshwright.plan.unbuilt import unbuilt_keys

__all__ = ["check_supported"]


def check_supported(plan: Plan) -> None:
    """Raise NotImplementedError that names every part of `plan` that could be priced but not run, or a RequestError for
    experts that are not run so."""
    parts = [f"{entry.part} ({entry.key} = {value})" for entry, value in unbuilt_keys(plan)]
    if parts:
        raise NotImplementedError(f"not built yet: {', '.join(parts)}")
    check_runs(plan)
