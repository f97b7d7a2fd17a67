"""What a plan may ask for that no executor does yet: refused when the engine is built, never left out in silence.

The list is that of run files, `config.built`; here its keys are read from a plan.
"""

from __future__ import annotations

from meshwright.config.built import unbuilt
from meshwright.plan.plan import Plan
from meshwright.plan.strategies.expert import check_runs

__all__ = ["check_supported"]


def check_supported(plan: Plan) -> None:
    """Raise NotImplementedError that names every part of `plan` that could be priced but not run, or a RequestError for
    experts that are not run so."""
    missing = [f"{entry.part} ({entry.key} = {value})" for entry, value in unbuilt(lambda key: _value(plan, key))]
    if missing:
        raise NotImplementedError(f"not built yet: {', '.join(missing)}")
    check_runs(plan)


def _value(plan: Plan, key: str) -> object:
    """What the plan says of a key of the run file; None where it says nothing, or has another place for it."""
    section, name = key.split(".")
    sections = {"mesh": plan.degrees, "optimizer": plan.optimizer, "precision": plan.precision, "moe": plan.moe}
    return getattr(sections.get(section), name, None)
