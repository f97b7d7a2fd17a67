"""What a plan may ask for that no executor does yet: refused when the engine is built, never left out in silence.

A part that is built loses its line here.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.plan.plan import Plan

__all__ = ["check_supported"]


def check_supported(plan: Plan) -> None:
    """Raise NotImplementedError that names every part of `plan` that could be priced but not run."""
    missing = list(_missing(plan))
    if missing:
        raise NotImplementedError(f"not built yet: {', '.join(missing)}")


def _missing(plan: Plan) -> Iterator[str]:
    if plan.degrees.cp > 1:
        yield f"context parallelism (cp {plan.degrees.cp})"
    if plan.degrees.ep > 1:
        yield f"expert parallelism (ep {plan.degrees.ep})"
    if plan.execution.asynchronous_tensor:
        yield "asynchronous tensor collectives"
