"""From whatever names a run to its plan, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.arch.resolve import arch_from_model
from meshwright.config.load import build_run, load_run
from meshwright.config.schema import RunConfig
from meshwright.plan.plan import Plan
from meshwright.plan.resolve import resolve

__all__ = ["Request", "plan_run", "run_of"]

Request = RunConfig | Mapping[str, Any] | str | Path
"""A validated run, its tables, or the path of a run file."""


def plan_run(run: Request, *, ranks: int | None = None) -> Plan:
    """The plan of a run; `ranks` is needed for mesh.dp = "fill".

    Raises RequestError where the request is impossible. Imports no torch, starts and reads nothing else.
    """
    run = run_of(run)
    return resolve(run, arch_from_model(run.model), ranks)


def run_of(run: Request) -> RunConfig:
    """The validated run that `run` names. Raises RequestError."""
    if isinstance(run, (str, Path)):
        return load_run(Path(run))
    return build_run(run) if isinstance(run, Mapping) else run
