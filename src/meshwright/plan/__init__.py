"""The plan of a run and what follows from it. The package may be called: `meshwright.plan(run)` plans a run."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.plan.front import Request
    from meshwright.plan.plan import Plan


class _CallablePackage(ModuleType):
    """Users call what developers import from, and both are named `plan`."""

    def __call__(self, run: Request, *, ranks: int | None = None) -> Plan:
        """See `meshwright.plan.front.plan_run`."""
        from meshwright.plan.front import plan_run

        return plan_run(run, ranks=ranks)


sys.modules[__name__].__class__ = _CallablePackage
