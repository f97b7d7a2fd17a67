"""What failures cost a long run, and what a lost rank takes with it.

M = mean time between failures of the run = of one device / devices
d = what a checkpoint blocks      R = restart, with loading

Young 1974     tau = sqrt(2 d M)
Daly 2006      tau = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d,  M where d >= 2M     (eq. 37)
run time       M e^(R/M) (e^((tau+d)/M) - 1) / tau for every second of work                 (eq. 20)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.arch.arithmetic import parameters
from meshwright.config.counted import counted
from meshwright.layout.axes import Axis
from meshwright.plan.plan import Plan
from meshwright.price.layouts import of_plan
from meshwright.price.price import Price
from meshwright.price.text import bytes_text, seconds_text
from meshwright.price.weights import owned, weights

__all__ = ["Loss", "checkpoint_bytes", "daly", "goodput", "goodput_told", "lost", "lost_told", "written_bytes", "young"]


_TOLD = 24  # pieces that are listed
_LEAST_BLOCKED_S = 1e-3  # ranks meet at least; of a checkpoint that blocks nothing the best interval would be none


def young(blocked_s: float, mtbf_s: float) -> float:
    """Seconds of work between checkpoints (Young 1974, CACM 17(9))."""
    return math.sqrt(2 * blocked_s * mtbf_s)


def daly(blocked_s: float, mtbf_s: float) -> float:
    """The same, of higher order (Daly 2006, FGCS 22(3), eq. 37)."""
    if blocked_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = blocked_s / (2 * mtbf_s)
    return math.sqrt(2 * blocked_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocked_s


def goodput(interval_s: float, blocked_s: float, restart_s: float, mtbf_s: float) -> float:
    """The share of time that is work that stays (Daly 2006, eq. 20); 0 where failures come faster than saves."""
    exponent = (interval_s + blocked_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 700:
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))


def checkpoint_bytes(plan: Plan) -> int:
    """Bytes of a checkpoint: weights, in the type of the optimizer's copy, and moments once, whatever the layout."""
    return parameters(plan.arch) * _saved(plan)


def written_bytes(price: Price) -> float:
    """Bytes of it that the rank with most writes: each element is written once, by a rank that updates it."""
    layout = of_plan(price.plan)
    held = weights(price.target, layout)
    most = max(float(owned(layout, *stage)[0]) for stage in zip(held.dense, held.routed, strict=True))
    return most * _saved(price.plan)


def _saved(plan: Plan) -> int:
    """Bytes of an element in a checkpoint."""
    return plan.precision.master.num_bytes * (1 + plan.optimizer.num_moments)


def goodput_told(
    price: Price, mtbf_hours: float, restart_s: float, blocked_s: float | None = None
) -> tuple[Mapping[str, float], list[str]]:
    """Goodput of a run as data and as lines. `mtbf_hours` is of one device; without `blocked_s` a checkpoint blocks
    while the rank that writes most copies that to host memory."""
    ranks = price.plan.degrees.ranks
    mtbf = mtbf_hours * 3600 / ranks
    copied_s = written_bytes(price) / price.cluster.node.host_bytes_per_s
    blocked = max(copied_s if blocked_s is None else blocked_s, _LEAST_BLOCKED_S)
    wanted = daly(blocked, mtbf)
    interval = max(wanted, price.step_seconds)  # between two steps, not within one
    share = goodput(interval, blocked, restart_s, mtbf)
    steps = max(1, round(interval / price.step_seconds))
    found = {"mtbf_s": mtbf, "checkpoint_blocks_s": blocked, "young_s": young(blocked, mtbf), "daly_s": wanted,
             "interval_s": interval, "every_steps": float(steps), "restart_s": restart_s, "goodput": share,
             "checkpoint_bytes": float(checkpoint_bytes(price.plan))}  # fmt: skip
    size = bytes_text(found["checkpoint_bytes"])
    rules = f"Daly {seconds_text(wanted)}, Young {seconds_text(found['young_s'])}"
    lines = [
        "failures:",
        f"  one every {_hours(mtbf)} on {counted(ranks, 'device')}; a checkpoint of {size} blocks "
        f"{seconds_text(blocked)}, a restart takes {seconds_text(restart_s)}",
        f"  save every {seconds_text(interval)} ({rules}): checkpoint.every = {steps}; "
        f"{share:.2%} of the time is work that stays",
    ]
    return found, lines


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 3600 else seconds_text(seconds)


@dataclass(frozen=True, slots=True)
class Loss:
    """One kind of state that lost ranks held: who holds the same elements still. No holders: it is gone."""

    what: str
    coordinates: str
    holders: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "coordinates": self.coordinates, "holders": list(self.holders)}


def lost(plan: Plan, ranks: Sequence[int]) -> list[Loss]:
    """What goes with `ranks`, by piece, and the ranks left that hold it.

    Copies of a piece are on the ranks of its replica group that no sharding tells apart: all of dp x ep x cp (experts:
    dp x cp) for what is whole, those with the same place in the shard group for what ZeRO divides.
    """
    degrees, zero = plan.degrees, plan.sharding.stage
    gone = set(ranks)
    found: dict[tuple[str, str], Loss] = {}
    kinds = [("parameters", zero == 3), ("optimizer state and master copies", zero >= 1)]
    routed = plan.arch.experts is not None
    for rank in ranks:
        for experts in (False, True) if routed else (False,):
            for what, sharded in kinds:
                members = _replicas(plan, rank, experts)
                # Only what all replicas share is sharded inside groups (`plan/buckets.py`): experts over all of theirs.
                ways = len(members) if experts else plan.sharding.within or len(members)
                place = members.index(rank)
                same = [other for at, other in enumerate(members) if not sharded or at % ways == place % ways]
                left = tuple(other for other in same if other not in gone)
                at = degrees.coordinates(rank)
                piece = f"pp {at.pp}, tp {at.tp}" + (f", ep {at.ep}" if experts else "")
                if sharded:
                    piece += f", shard {place % ways} of {ways}"
                name = ("experts' " if experts else "") + what
                found[name, piece] = Loss(name, piece, left)
    return list(found.values())


def _replicas(plan: Plan, rank: int, experts: bool) -> list[int]:
    """The ranks that hold the tensors of `rank` on the same stage and tensor coordinate, in order."""
    degrees = plan.degrees
    axes = (Axis.DP, Axis.CP) if experts else (Axis.DP, Axis.EP, Axis.CP)
    base = rank - sum(degrees.coordinates(rank).on(axis) * degrees.stride(axis) for axis in axes)
    ranks = [base]
    for axis in axes:
        ranks = [one + step * degrees.stride(axis) for one in ranks for step in range(degrees.on(axis))]
    return sorted(ranks)


def _held_by(ranks: Sequence[int]) -> str:
    if not ranks:
        return "GONE"
    if len(ranks) == 1:
        return f"still on rank {ranks[0]}"
    return f"still on {counted(len(ranks), 'rank')}, the first of them {ranks[0]}"


def lost_told(plan: Plan, ranks: Sequence[int]) -> tuple[list[dict[str, Any]], list[str]]:
    """The same as data and as lines."""
    losses = lost(plan, ranks)
    named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    lines = [f"lost with {named}:"]
    for each in losses[:_TOLD]:
        lines.append(f"  {each.what} of {each.coordinates}: {_held_by(each.holders)}")
    if len(losses) > _TOLD:
        lines.append(f"  and {counted(len(losses) - _TOLD, 'piece')} more")
    gone = sum(not each.holders for each in losses)
    verdict = "nothing is gone: every piece has a copy"
    if gone:
        verdict = f"{counted(gone, 'piece')} gone, held by checkpoints only"
    return [each.to_json() for each in losses], [*lines, f"  {verdict}"]
