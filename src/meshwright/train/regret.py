"""What another layout would have saved, at the rates that a run measured.

    rates       measured over predicted seconds, by cause: how this machine differs from the cluster it was priced on
    regret      every legal layout, searched again, each part of its step at the measured rate

What the present layout has none of (no stages, no replicas, no tensor axis) is not measured: it has the rate of what
was, and the line says so.

On a device that works asynchronously launches are not work: only the whole step is measured there, and all parts have
its one rate.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.config.errors import RequestError
from meshwright.config.load import build_run
from meshwright.config.schema import RunConfig
from meshwright.plan.plan import Plan
from meshwright.price.failures import checkpoint_bytes
from meshwright.price.price import Price, price
from meshwright.price.ranking import short
from meshwright.price.search import search
from meshwright.price.text import bytes_text, seconds_text
from meshwright.train.stopwatch import CAUSES, by_cause

__all__ = [
    "PARTS", "REGRET_AFTER", "Regret", "cluster_name", "predicted", "rates", "regret",
    "regret_line", "too_short_line",
]  # fmt: skip

REGRET_AFTER = 10
"""Steps that are measured before layouts are priced again."""

PARTS = tuple(CAUSES)
_BUDGET = 50_000
_AXES = {"dp": "replicas", "tp": "tensor axis", "pp": "stages", "cp": "context axis", "ep": "expert axis"}
_WORTH = 0.02  # of a step: less is within what prices know


_DEVICES = (("H200", "h200-sxm"), ("H800", "h800-sxm"), ("H100", "h100-sxm"), ("GB300", "gb300-nvl72"),
            ("GB200", "gb200-nvl72"), ("B300", "b300-sxm"), ("B200", "b200-sxm"), ("A100-SXM4-40", "a100-40gb-sxm"),
            ("A100", "a100-80gb-sxm"), ("V100", "v100-32gb-sxm"), ("L40S", "l40s"), ("4090", "rtx4090"),
            ("MI300X", "mi300x"))  # fmt: skip


def cluster_name(device: str) -> str:
    """The cluster of the catalogue for a device's name; "local", this machine as it was measured, for any other."""
    return next((cluster for part, cluster in _DEVICES if part in device), "local")


def predicted(parts: Mapping[str, float]) -> dict[str, float]:
    """Parts of a price, by cause."""
    return by_cause(parts)


def rates(own: Price, measured: Mapping[str, float] | None, step_seconds: float) -> dict[str, float]:
    """Measured over predicted seconds, by cause. What is too short to be measured has the rate of the whole step."""
    whole = step_seconds / own.step_seconds
    if measured is None:
        return dict.fromkeys(PARTS, whole)
    expected = predicted(own.parts)
    enough = 1e-3 * own.step_seconds
    out = {name: measured[name] / expected[name] if expected[name] > enough else whole for name in PARTS}
    out["stages"] = out["stages"] if own.plan.degrees.pp > 1 else out["computation"]
    return out


@dataclass(frozen=True, slots=True)
class Regret:
    """The best layout at the measured rates, and its step beside the present one's, both at these rates."""

    keys: Mapping[str, Any]
    seconds: float
    present_seconds: float


def regret(
    run: RunConfig, plan: Plan, cluster: str, measured: Mapping[str, float] | None, step_seconds: float
) -> Regret:
    """Price every legal layout that runs on as many ranks, at the measured rates."""
    own = price(plan, cluster)
    found = rates(own, measured, step_seconds)
    by_part = {part: found[cause] for cause, parts in CAUSES.items() for part in parts}

    def at_rates(each: Price) -> float:
        return sum(found[name] * seconds for name, seconds in predicted(each.parts).items())

    fixed = {"parallel.offload": run.parallel.offload.value}
    ranking = search(run, plan.degrees.ranks, cluster, top=12, fixed=fixed, budget=_BUDGET, suggest=False,
                     rates=by_part)  # fmt: skip
    candidates = [row for row in ranking.rows if row.price.runs]
    best = min(candidates, key=lambda row: at_rates(row.price), default=None)
    present = at_rates(own)
    if best is None or at_rates(best.price) >= present:
        return Regret({}, present, present)
    return Regret(best.keys, at_rates(best.price), present)


def regret_line(
    run_file: str, plan: Plan, cluster: str, measured: Mapping[str, float] | None, step_seconds: float
) -> str:
    """One line: what another layout would save, and what moving costs."""
    run = build_run(tomllib.loads(run_file))
    if step_seconds <= 0:
        return "regret: not known; no step was taken whose time counts"
    try:
        found = regret(run, plan, cluster, measured, step_seconds)
    except RequestError as error:  # what runs here may be more than the cluster it is priced on holds
        return f"regret: not known; on {cluster} no layout is priced: {error.value}: {error.rule}"
    saved = 1 - found.seconds / found.present_seconds
    if not found.keys or saved < _WORTH:
        ranks = plan.degrees.ranks
        others = f"no other layout of {ranks} ranks" if ranks > 1 else "no other layout of one rank"
        return f"regret: none; at the measured rates {others} saves {_WORTH:.0%} of a step"
    size = checkpoint_bytes(plan)
    new = [
        words for axis, words in _AXES.items() if found.keys[f"mesh.{axis}"] > 1 and getattr(plan.degrees, axis) == 1
    ]
    guess = f" (its {' and '.join(new)} not measured here)" if new else ""
    return (
        f"regret: {short(found.keys)} would take {seconds_text(found.seconds)} a step at the measured rates{guess}, "
        f"{saved:.0%} less; moving costs a checkpoint of {bytes_text(size)} written and read"
    )


def too_short_line(steps: int) -> str:
    """The line of a run that ended before other layouts were priced."""
    return f"regret: not asked; other layouts are priced after {REGRET_AFTER} measured steps, and {steps} were taken"
