"""What a plan asks for that nothing runs yet: priced and told by name, refused where an engine is built.

The list is that of run files, `config.built`; here its keys are read from a plan.
"""

from __future__ import annotations

from meshwright.arch.unbuilt import lacking
from meshwright.config.built import Unbuilt, unbuilt
from meshwright.plan.plan import Plan
from meshwright.plan.strategies.expert import unrunnable

__all__ = ["missing", "unbuilt_keys"]


def missing(plan: Plan) -> tuple[str, ...]:
    """What keeps `plan` from being run, by name; empty where it runs."""
    experts = [f"{error.value} with experts" for error in unrunnable(plan)]
    return (*lacking(plan.arch), *(entry.part.rstrip(",") for entry, _ in unbuilt_keys(plan)), *experts)


def unbuilt_keys(plan: Plan) -> list[tuple[Unbuilt, object]]:
    """The keys of `plan` that have a value that does not run, and that value."""
    return list(unbuilt(lambda key: _value(plan, key)))


def _value(plan: Plan, key: str) -> object:
    """What the plan says of a key of the run file; None where it says nothing, or has another place for it."""
    section, name = key.split(".")
    sections = {"optimizer": plan.optimizer, "precision": plan.precision, "moe": plan.moe}
    return getattr(sections.get(section), name, None)
