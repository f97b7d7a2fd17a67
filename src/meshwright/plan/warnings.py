"""What a plan does that its user may not want: told once before a run, refused never."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.choices import Recompute
from meshwright.plan.plan import Plan


def plan_warnings(plan: Plan, on_cpu: bool = False) -> tuple[str, ...]:
    """One sentence each, with what to do instead. `on_cpu`: where the plan will run."""
    return tuple(_warnings(plan, on_cpu))


def _warnings(plan: Plan, on_cpu: bool) -> Iterator[str]:
    precision, execution = plan.precision, plan.execution
    if precision.compute.num_bytes < 4 and not precision.has_master:
        yield (
            f"{precision.compute} parameters are updated in place: steps smaller than their rounding are lost "
            f'(norm gains near 1 stop moving); precision.master = "float32" keeps a copy that does not round'
        )
    if execution.asynchronous_tensor and on_cpu:
        yield (
            "parallel.asynchronous_tensor gains nothing on CPUs, where what sends is what computes; it changes no "
            "number, and is meant for CUDA"
        )
    if execution.compile and execution.recompute is Recompute.SELECTIVE:
        yield (
            "with parallel.compile the compiler chooses what is computed again: all that is wide and cheap, but not "
            'attention; parallel.recompute = "full" is exact with it'
        )
