"""A step in the closing table: what it was predicted to spend beside what it spent, by part. The parts add up to it.

    a step, priced on h100-sxm         1.240 s           1.310 s
      computation                      1.001 s   81 %    1.048 s   80 %
        forward                      334.00 ms   27 %  345.00 ms   26 %
        backward                     ...
      replicas                       150.00 ms   12 %  170.00 ms   13 %

On a device that works asynchronously only the whole step is measured. Rates that are guesses give no seconds: the step
is told as its range, and parts as shares of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.price.price import Price
from meshwright.price.text import seconds_text
from meshwright.train.stopwatch import COMPUTE_PARTS, STEP_PARTS

__all__ = ["spent_rows"]

_WORDS = {
    "compute": "computation", "dp": "replicas", "tp": "tensor axis", "pp": "messages", "cp": "context axis",
    "ep": "expert axis", "bubble": "pipeline bubble", "optimizer": "optimizer", "data": "data", "other": "other",
    "recompute": "recomputation",
}  # fmt: skip
_SHOWN = 5e-4  # of a step: less is no row


def spent_rows(own: Price, measured: Mapping[str, float] | None, step_seconds: float) -> list[list[str]]:
    """Rows of three cells: part, predicted, measured.

    `measured`: seconds by part of a mean step, those of `compute` too, or None; they are shown as parts of
    `step_seconds`, the median one (0: none was measured).
    """
    expected = {**own.parts, **own.compute_parts}
    seen = _scaled(measured, step_seconds)
    rows = [[f"a step, priced on {own.cluster.name}", _step(own), _seconds(step_seconds) if step_seconds else "-"]]
    for name in _ordered():
        shares = expected[name] / own.step_seconds, seen[name] / step_seconds if seen else 0.0
        if max(map(abs, shares)) >= _SHOWN:
            label = ("    " if name in COMPUTE_PARTS.values() else "  ") + _WORDS.get(name, name)
            told = f"guess: {_share(shares[0])}" if own.is_uncalibrated else _part(expected[name], shares[0])
            rows.append([label, told, _part(seen[name], shares[1]) if seen else "-"])
    return rows


def _ordered() -> list[str]:
    """All parts, what `compute` is made of below it."""
    first, *others = STEP_PARTS
    return [first, *dict.fromkeys(COMPUTE_PARTS.values()), *others]


def _scaled(measured: Mapping[str, float] | None, step_seconds: float) -> dict[str, float]:
    whole = sum(measured[name] for name in STEP_PARTS) if measured else 0.0
    if measured is None or not whole or not step_seconds:
        return {}
    return {name: seconds * step_seconds / whole for name, seconds in measured.items()}


def _step(own: Price) -> str:
    if not own.is_uncalibrated:
        return _seconds(own.step_seconds)
    low, high = map(seconds_text, own.range_seconds)
    return f"guess: {low} to {high}"


def _part(seconds: float, share: float) -> str:
    return f"{seconds_text(seconds)}  {_share(share)}"


def _share(share: float) -> str:
    return f"{100 * share:3.0f} %"


def _seconds(seconds: float) -> str:
    """Of the whole: in line with the seconds of its parts."""
    return f"{seconds_text(seconds)}  {'':5}"
