"""Seconds of a pipeline from the seconds of its stages, in closed form, over arrays.

One micro-batch costs stage i  f_i forward and b_i backward; a message between neighbours takes c. The outer stages
differ from those between them; the fullest of the inner ones stands for all that it bounds.

1F1B: stage s starts after the stages before it, works through m micro-batches, and waits twice for what lies behind
it, less the work it has meanwhile (once where all forwards come first); or
round trips pace it, p - s micro-batches each:

    work     sum_{i<s} (f_i + b_i + 2c) + m (f_s + b_s) + [R - (p-1-s) f_s]+ + [R - (p-1-s) b_s]+
    rounds   sum_{i<s} (f_i + b_i + 2c) + (q + 1) (f_s + b_s + R) + r (f_s + b_s)     m - 1 = q (p - s) + r
    R = sum_{i>s} (f_i + b_i + 2c),  [x]+ = max(x, 0)

Where a stage recomputes its last block while it waits for a cotangent, each stage but the last hides that much of
every backward that comes after a wait.

The step is the largest of these over s. gpipe: two flow shops one after the other. interleaved (Narayanan 2021, section
2.2): the fill is 1 / v of a round. zb-h1, zb-v (Qi et al. 2023, arXiv:2401.10241, table 1): full from p and 2p - 1
micro-batches on. A lone one waits for forward and backward, without weight products, of all other stages, two thirds of
their work; each further one fills an equal part of what that is more than when full.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.config.choices import Schedule
from meshwright.price.layouts import SCHEDULES, Array, Layouts


@dataclass(frozen=True)
class Stages:
    """Seconds of one micro-batch, all chunks of a coordinate together: the first, the fullest inner, the last stage;
    `whole` are sums over all stages, `early` over the inner ones before the fullest. Inner figures are 0 where there
    are none."""

    first: tuple[Array, Array]
    early: tuple[Array, Array]
    inner: tuple[Array, Array]
    last: tuple[Array, Array]
    whole: tuple[Array, Array]


def pipeline_seconds(
    layouts: Layouts, stages: Stages, message: Array, hidden: float = 0.0, hoisted: Array | float = 0.0
) -> Array:
    """From the first forward to the last backward; `hidden` is the share of messages that computation hides,
    `hoisted` the seconds of a backward that a stage does while it waits for the cotangent."""
    p, m, v = layouts.pp, layouts.accumulation, layouts.chunks
    slowest = np.maximum(np.maximum(sum(stages.first), sum(stages.last)), sum(stages.inner))
    total = stages.whole[0] + stages.whole[1]
    lone = p == 1
    out = np.where(lone, m * total, 0.0)
    shown = message * (1 - hidden)
    for index, schedule in enumerate(SCHEDULES):
        here = (layouts.schedule == index) & ~lone
        if not here.any():
            continue
        match schedule:
            case Schedule.ONE_F_ONE_B:
                seconds = _one_f_one_b(layouts, stages, message, shown, hoisted)
            case Schedule.GPIPE:
                seconds = _gpipe(p, m, stages, message) - (p - 1) * hoisted
            case Schedule.NAIVE:
                seconds = m * (total + (p - 1) * (2 * message - hoisted))
            case Schedule.INTERLEAVED:
                seconds = m * slowest + (total - slowest) / v + 2 * shown * m * v + 2 * message * (p - 1)
            case Schedule.ZB_H1:
                waits = (total - slowest) / 3 * (1 + _missing(m, p))
                seconds = m * slowest + waits + 2 * shown * m + 2 * message * (p - 1)
            case Schedule.ZB_V:
                waits = (total - slowest) / 3 * 2 * _missing(m, 2 * p - 1)
                seconds = m * slowest + waits + 2 * shown * m * v + 2 * message * (p - 1)
        out = np.where(here, seconds, out)
    return np.asarray(out)


def _missing(micros: Array, full: Array) -> Array:
    """The part of the micro-batches that fill a pipeline, besides the first, which are not there."""
    return np.asarray(np.maximum(full - micros, 0) / np.maximum(full - 1, 1))


def _one_f_one_b(layouts: Layouts, stages: Stages, message: Array, shown: Array, hoisted: Array | float) -> Array:
    """The largest bound over the first stage, the fullest inner one and the last."""
    p, m, place = layouts.pp, layouts.accumulation, layouts.place
    total = stages.whole[0] + stages.whole[1]
    first, inner, last = sum(stages.first), sum(stages.inner), sum(stages.last)
    hop, before = 2 * message - hoisted, first + sum(stages.early)
    none = np.zeros_like(p)
    at_first = _bound(m, p, none, stages.first, none, total - first, hop, 2 * shown - hoisted)
    behind = total - before - inner
    at_inner = _bound(m, p, place, stages.inner, before + place * hop, behind, hop, 2 * shown - hoisted)
    at_last = total - last + hop * (p - 1) + m * last
    return np.asarray(np.maximum(np.maximum(at_first, np.where(p > 2, at_inner, 0.0)), at_last))


def _bound(
    m: Array, p: Array, s: Array, own: tuple[Array, Array], before: Array, behind: Array, hop: Array, shown: Array
) -> Array:
    """Work and rounds of stage `s`; a hop is there and back between neighbours."""
    forward, backward = own
    after = p - 1 - s
    fewer = np.minimum(after, m - 1)
    edge = behind + after * hop
    first, last = np.maximum(edge - fewer * forward, 0), np.maximum(edge - fewer * backward, 0)
    wait = np.where(m > after + 1, first + last, np.maximum(first, last))  # one wait where no forward follows it
    work = before + m * (forward + backward) + wait
    many = np.maximum(p - s, 1)
    rounds = np.floor((m - 1) / many)  # np.divmod takes five times as long
    rest = m - 1 - rounds * many
    paced = behind + after * shown
    round_trips = before + (rounds + 1) * (forward + backward + paced) + rest * (forward + backward)
    return np.asarray(np.maximum(work, round_trips))


def _gpipe(p: Array, m: Array, stages: Stages, message: Array) -> Array:
    seconds = 2 * (p - 1) * message
    for phase in (0, 1):
        slowest = np.maximum(np.maximum(stages.first[phase], stages.inner[phase]), stages.last[phase])
        seconds = seconds + stages.whole[phase] + (m - 1) * slowest
    return np.asarray(seconds)


def in_flight(layouts: Layouts, stage: Array) -> Array:
    """Micro-batches (of a whole coordinate's blocks) whose activations stage `stage` (0 ..) keeps at most.

    1F1B p - stage; interleaved p (1 + (p - 1) / (p v)) on the first (Korthikanti 2022, section 4.2.3); gpipe all;
    zb-h1 as 1F1B, zb-v the p of a first 1F1B stage everywhere (arXiv:2401.10241, 2405.15362).
    """
    p, m, v = layouts.pp, layouts.accumulation, layouts.chunks
    kind = [layouts.schedule == index for index in range(len(SCHEDULES))]
    at = {schedule: kind[index] for index, schedule in enumerate(SCHEDULES)}
    usual = p - stage
    chunked = (2 * (p - stage - 1) + (v - 1) * p + 1) / v
    flight = np.where(at[Schedule.INTERLEAVED] & (p > 1), chunked, usual)
    flight = np.where(at[Schedule.ZB_V], p, flight)
    flight = np.where(at[Schedule.GPIPE], m, np.where(at[Schedule.NAIVE], 1.0, flight))
    return np.asarray(np.minimum(flight, m))
