"""Seconds of a step, in closed form, over arrays of layouts, with a split that adds up to it.

    step = pipeline (compute, tensor, context, expert, border, bubble) + gradient sums and gathers that nothing hides
           + the optimizer + the host

The split is that of the pipeline stage that works longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.config.choices import Recompute
from meshwright.layout.axes import Axis
from meshwright.price.cluster import Following
from meshwright.price.compute import Units, straggling
from meshwright.price.exposure import outer_exposed, step_exposed
from meshwright.price.layouts import RECOMPUTES, Array, Layouts
from meshwright.price.links import message_seconds
from meshwright.price.replicas import Replicas, replicas
from meshwright.price.schedule import Stages, pipeline_seconds
from meshwright.price.target import Target
from meshwright.price.weights import Weights


@dataclass(frozen=True)
class Times:
    """Seconds; `step` is the sum of the others."""

    step: Array
    compute: Array
    tp: Array
    cp: Array
    ep: Array
    dp: Array
    pp: Array
    bubble: Array
    optimizer: Array
    other: Array


PARTS = ("compute", "dp", "tp", "pp", "cp", "ep", "bubble", "optimizer", "other")


@dataclass(frozen=True)
class Block:
    """Seconds of a mean block and micro-batch, recomputation in `backward`, by cause; `sharded`: ZeRO's share."""

    forward: Array
    backward: Array
    tp: Array
    cp: Array
    ep: Array
    host: Array
    sharded: Array
    ahead: Array  # all of the forward
    whole: Array  # all of both
    front: Array  # the forward alone, without what ZeRO adds
    behind: Array  # the backward alone, without recomputation by an action of its own


def block_seconds(target: Target, layouts: Layouts, units: Units, replica: Replicas) -> Block:
    """What a block takes with everything that happens inside it."""
    given = units.exchanged
    full = (layouts.recompute == RECOMPUTES.index(Recompute.FULL)) * target.cluster.software.share
    core = (layouts.recompute == RECOMPUTES.index(Recompute.SELECTIVE)) * target.cluster.software.share
    backward = units.backward + full * units.forward + core * units.core
    tp, cp, ep = (
        (1 + full) * ahead + behind
        for ahead, behind in (
            (given.tp_forward, given.tp_backward),
            (given.cp_forward, given.cp_backward),
            (given.ep_forward, given.ep_backward),
        )
    )
    ahead = units.forward + given.tp_forward + given.cp_forward + given.ep_forward
    busy = units.forward + backward + tp + cp + ep
    host = _smooth(busy, units.host * (1 + full / 3)) - busy
    # ZeRO hides gathers and scatters behind a unit, and what runs at once slows the shorter.
    slow, behind = target.values["overlap.slow"], busy - ahead + 2 * host / 3
    front = ahead + host / 3
    if target.legacy:
        sharded = replica.forward + replica.backward
        before = replica.forward
    else:
        before = np.maximum(replica.forward - front, 0) + slow * np.minimum(replica.forward, front)
        after = np.maximum(replica.backward - behind, 0) + slow * np.minimum(replica.backward, behind)
        sharded = before + after
    alone = units.backward + given.tp_backward + given.cp_backward + given.ep_backward + core * units.core
    return Block(units.forward, backward, tp, cp, ep, host, sharded, front + before, busy + host + sharded, front,
                 alone + 2 * host / 3)  # fmt: skip


def times(target: Target, layouts: Layouts, units: Units, held: Weights) -> Times:
    """The step of every layout."""
    replica = replicas(target, layouts, held)
    units = units.slowed(1 + straggling(target, layouts))
    block = block_seconds(target, layouts, units, replica)
    m, lone = layouts.accumulation, layouts.pp == 1
    outer = units.exchanged.tp_outer
    further = target.predicted
    shown = _outer(target, layouts, replica, units, block)
    embedding = units.embedding_forward + outer / 2, units.embedding_backward + outer / 2 + shown[2]
    head = units.head_forward + shown[0], units.head_backward + outer / 2 + shown[1]
    heads = tuple((1 + further) * each + further * part for each, part in zip(head, _passes(block), strict=True))
    stages = _stages(layouts, _passes(block), embedding, (heads[0], heads[1]))
    literal = target.cluster.software.following is Following.LITERAL
    message = _message(target, layouts, literal)
    hidden = 0.0 if target.legacy or literal else target.values["overlap.border"]
    hoisted = _hoisted(layouts, block) if literal else 0.0
    run = pipeline_seconds(layouts, stages, message, hidden, hoisted)
    still = pipeline_seconds(layouts, stages, np.zeros_like(message), hidden, hoisted)
    inner, tail = sum(stages.inner), sum(stages.last)
    slow_last = (tail >= sum(stages.first)) & (tail >= inner) & ~lone
    slow_first = ~slow_last & (sum(stages.first) >= inner)
    blocks = np.where(slow_last, layouts.last + further, np.where(slow_first, layouts.first, layouts.most))
    blocks = np.where(lone, layouts.first + further, blocks)
    at_start = np.where(slow_first | lone, 1.0, 0.0)
    at_end = np.where(slow_last | lone, 1.0 + further, 0.0)
    outside = np.where(slow_last | lone, (1 + further) * (units.head_forward + units.head_backward), 0.0)
    outside = outside + np.where(slow_first | lone, units.embedding_forward + units.embedding_backward, 0.0)
    sides = np.where(slow_last | lone, (1 + further) * outer / 2, 0.0) + np.where(slow_first | lone, outer, 0.0)
    working = m * (blocks * block.whole + outside + sides + at_end * (shown[0] + shown[1]) + at_start * shown[2])
    summed = step_exposed(target, layouts, replica, stages, units, busy_behind(layouts, block))
    optimizer = replica.optimizer
    return Times(
        step=run + summed + optimizer,
        compute=m * (blocks * (block.forward + block.backward) + outside),
        tp=m * (blocks * block.tp + sides),
        cp=m * blocks * block.cp,
        ep=m * blocks * block.ep,
        dp=m * (blocks * block.sharded + at_end * (shown[0] + shown[1]) + at_start * shown[2]) + summed,
        pp=run - still,
        bubble=np.maximum(still - working, 0.0),
        optimizer=optimizer,
        other=m * blocks * block.host + np.minimum(still - working, 0.0),
    )


def _outer(
    target: Target, layouts: Layouts, replica: Replicas, units: Units, block: Block
) -> tuple[Array, Array, Array]:
    """What the outer units' own gathers and scatters show in a micro-batch of the literal program."""
    if target.cluster.software.following is Following.LITERAL:
        return outer_exposed(layouts, replica, units, block.front, busy_behind(layouts, block))
    nothing = np.zeros_like(layouts.pp)
    return nothing, nothing, nothing


def busy_behind(layouts: Layouts, block: Block) -> Array:
    """A block's backward with what it computes again, without what ZeRO adds."""
    return np.asarray(block.whole - block.sharded - block.front)


def _hoisted(layouts: Layouts, block: Block) -> Array:
    """What the literal program recomputes of a backward while it waits for the cotangent: the stage's last block."""
    full = layouts.recompute == RECOMPUTES.index(Recompute.FULL)
    return np.asarray(np.where(full, block.front - block.host / 3, 0.0))


def _passes(block: Block) -> tuple[Array, Array]:
    return block.ahead, block.whole - block.ahead


def _stages(
    layouts: Layouts, block: tuple[Array, Array], embedding: tuple[Array, Array], head: tuple[Array, Array]
) -> Stages:
    first, inner, last, whole = [], [], [], []
    total = layouts.first + np.where(layouts.pp > 1, layouts.last, 0.0)
    for one, start, end in zip(block, embedding, head, strict=True):
        first.append(layouts.first * one + start)
        inner.append(layouts.most * one)
        last.append(layouts.last * one + end)
        whole.append((total + layouts.inner) * one + start + end)
    return Stages((first[0], first[1]), (inner[0], inner[1]), (last[0], last[1]), (whole[0], whole[1]))


def _message(target: Target, layouts: Layouts, literal: bool) -> Array:
    """Seconds of a border value: its tokens are cut over tp under sequence parallel, and by usual stacks always."""
    tokens = layouts.micro * target.sequence / layouts.cp
    cut = layouts.tp if not literal else np.where(layouts.sequence > 0, layouts.tp, 1.0)
    num_bytes = tokens * target.shapes.hidden * target.stored / cut
    return message_seconds(target, num_bytes, layouts.stride(Axis.PP))


def _smooth(busy: Array, host: Array) -> Array:
    """The larger of two, rounded where they meet: short gaps remain while neither is far behind."""
    larger = np.maximum(np.maximum(busy, host), 1e-12)
    return np.asarray(larger * ((busy / larger) ** 6 + (host / larger) ** 6) ** (1 / 6))
