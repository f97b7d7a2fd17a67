"""What a plan does that its user may not want: told once before a run, refused never."""

from __future__ import annotations

from meshwright.plan.plan import Plan


def plan_warnings(plan: Plan) -> tuple[str, ...]:
    """One sentence each, with what to do instead."""
    precision = plan.precision
    if precision.compute.num_bytes < 4 and not precision.has_master:
        return (
            f"{precision.compute} parameters are updated in place: steps smaller than their rounding are lost "
            f'(norm gains near 1 stop moving); precision.master = "float32" keeps a copy that does not round',
        )
    return ()
