"""Fitting the fitted constants, and leaving one publication out: the same arithmetic for the test and the table.

Residuals are log(priced / published) of step times. A constant moves from its prior value as far as the runs move it:
damped Gauss-Newton in log space, with Huber's weights so that a few odd rows do not steer it. Rows of one publication
share what its text does not say of its stack: an offset of their own, which no price ever reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from meshwright.config.errors import RequestError
from meshwright.price.constants import FITTED, VALUES
from meshwright.price.estimate import Estimates, estimate
from meshwright.price.layouts import Layouts, of_plan
from meshwright.price.request import requested
from meshwright.price.target import Target, target_of
from tests.unit.price import published

PRIORS = {  # value, standard deviation of its logarithm
    "matrix.ampere.16": (1.0, 0.03),  # products alone
    "matrix.hopper.16": (0.95, 0.15),  # products alone; how far training falls short of them is not known before
    "matrix.hopper.8": (1.0, 0.05),
    "matrix.blackwell.8": (0.97, 0.05),
    "clock.power": (0.75, 0.2),  # between the square root and proportional
    "attention.hopper.triton": (0.25, 0.1),
    "attention.hopper.flash3": (0.60, 0.1),  # its paper, forward
    "attention.blackwell.flash3": (0.50, 0.1),
    "elementwise.eager": (1.6, 0.05),  # counted kernel by kernel: see docs/pricing.md
    "host.experts": (7e-3, 0.3),
}
"""What is known of each fitted constant without any run: measured alone, papers, counts, orders of magnitude."""

_NOISE = 0.06  # of a published step time
_SHARED = 0.03  # of all those of one publication
_STEP = 0.02


@dataclass(frozen=True)
class Case:
    row: published.Row
    target: Target
    layouts: Layouts

    @property
    def seconds(self) -> float:
        return float(self.row["measured"]["iter_time_s"])

    def estimate(self, values: Mapping[str, float] = VALUES) -> Estimates:
        return estimate(dataclasses.replace(self.target, values=values), self.layouts)


def case(row: published.Row, recompute: str | None = None, share: float = 1.0) -> Case:
    words = published.words(row, recompute, share)
    _, plan, cluster = requested(None, words[4:], words[1], int(words[3]))
    return Case(row, target_of(plan, cluster), of_plan(plan))


def fits(one: Case) -> bool:
    """Whether the device holds it: what the allocator reserves and the context, communicators aside."""
    return bool(one.estimate().memory.reserved[0] <= one.target.cluster.device.memory_bytes)


def completed(row: published.Row) -> Case:
    """The row with the least recomputation that fits, where it does not say."""
    plain = case(row)
    if row["recompute"] is not None or fits(plain):
        return plain
    cheap = case(row, "selective")
    if fits(cheap):
        return cheap
    for tenths in range(1, 11):
        some = case(row, "full", tenths / 10)
        if fits(some):
            return some
    return some


@cache
def cases(tier: str = "core") -> tuple[Case, ...]:
    """Every row of a tier that has a step time and can be asked for."""
    out = []
    for row in published.rows(tier):
        if not row["measured"].get("iter_time_s"):
            continue
        try:
            out.append(completed(row))
        except RequestError:
            if tier == "core":
                raise
    return tuple(out)


def errors(some: Sequence[Case], values: Mapping[str, float] = VALUES) -> np.ndarray:
    """log(priced / published)."""
    return np.array([np.log(one.estimate(values).times.step[0] / one.seconds) for one in some])


def moved(values: Mapping[str, float], by: Mapping[str, float]) -> dict[str, float]:
    return {**values, **{name: values[name] * float(np.exp(step)) for name, step in by.items()}}


@cache
def slopes() -> tuple[np.ndarray, np.ndarray]:
    """Errors of the core rows at the shipped constants, and how each constant changes them."""
    base = errors(cases())
    columns = [(errors(cases(), moved(VALUES, {name: _STEP})) - base) / _STEP for name in FITTED]
    return base, np.stack(columns, axis=1)


def fit(keep: np.ndarray) -> dict[str, float]:
    """The constants that the kept rows ask for: the model linear around the shipped ones."""
    base, slope = slopes()
    sources = np.array([published.source(one.row) for one in cases()])[keep]
    offsets = (sources[:, None] == np.unique(sources)).astype(np.float64)
    design = np.hstack([slope[keep], offsets])
    start = np.array([np.log(PRIORS[name][0] / VALUES[name]) for name in FITTED] + [0.0] * offsets.shape[1])
    width = np.array([PRIORS[name][1] for name in FITTED] + [_SHARED] * offsets.shape[1])
    step = np.zeros_like(start)
    for _ in range(30):
        left = base[keep] + design @ step
        weight = 1 / np.maximum(1, np.abs(left) / (1.5 * _NOISE))
        rows = design * (weight / _NOISE**2)[:, None]
        normal = rows.T @ design + np.diag(1 / width**2)
        right = -(rows.T @ left) + (start - step) / width**2
        step = step + 0.7 * np.linalg.solve(normal, right)
    return moved(VALUES, dict(zip(FITTED, step, strict=False)))


def left_out() -> dict[str, np.ndarray]:
    """Errors of each publication, priced with constants that never saw it."""
    sources = np.array([published.source(one.row) for one in cases()])
    out = {}
    for name in dict.fromkeys(sources):
        values = fit(sources != name)
        out[name] = np.exp(errors([one for one, its in zip(cases(), sources, strict=True) if its == name], values)) - 1
    return out
