"""Seconds of a step, in closed form, over arrays of layouts, with a split that adds up to it.

    step = pipeline (compute, tensor, context, expert, border, bubble) + gradient sums and gathers that nothing hides
           + the optimizer + the host

The split is that of the pipeline stage that works longest.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from meshwright.config.choices import Recompute
from meshwright.layout.axes import Axis
from meshwright.price.compute import Units, straggling
from meshwright.price.exposure import step_exposed
from meshwright.price.layouts import RECOMPUTES, Array, Layouts
from meshwright.price.links import message_seconds
from meshwright.price.replicas import Replicas, replicas
from meshwright.price.schedule import Stages
from meshwright.price.sharing import on_shared_processors
from meshwright.price.slots import Pair, Room, Slots, slots
from meshwright.price.target import Target
from meshwright.price.weights import Weights


@dataclass(frozen=True)
class Times:
    """Seconds; `step` is the sum of the others. `forward` and `again` (what an action of its own computes again) are
    parts of `compute`."""

    step: Array
    compute: Array
    forward: Array
    again: Array
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
    again: Array  # of `backward`: what an action of its own computes again
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
    host = units.host * (1 + full / 3)
    if not target.direct:  # a device computes while its host launches; a processor is its own host
        host = _smooth(busy, host) - busy
    # ZeRO hides gathers and scatters behind a unit, and what runs at once slows the shorter.
    slow, behind = target.values["overlap.slow"], busy - ahead + 2 * host / 3
    front = ahead + host / 3
    alone = units.backward + given.tp_backward + given.cp_backward + given.ep_backward + core * units.core
    alone = alone + 2 * host / 3
    if target.legacy:
        sharded = replica.forward + replica.backward
        before = replica.forward
    elif target.is_literal:  # what does not hide: slots.py
        before = slow * np.minimum(replica.forward, front)
        sharded = before + slow * np.minimum(replica.backward, alone)
    else:
        before = np.maximum(replica.forward - front, 0) + slow * np.minimum(replica.forward, front)
        after = np.maximum(replica.backward - behind, 0) + slow * np.minimum(replica.backward, behind)
        sharded = before + after
    again = full * units.forward
    return Block(units.forward, backward, tp, cp, ep, host, sharded, again, front + before, busy + host + sharded,
                 front, alone)  # fmt: skip


def times(target: Target, layouts: Layouts, units: Units, held: Weights) -> Times:
    """The step of every layout."""
    replica = replicas(target, layouts, held)
    units = units.slowed(1 + straggling(target, layouts))
    block = block_seconds(target, layouts, units, replica)
    m, lone = layouts.accumulation, layouts.pp == 1
    outer = units.exchanged.tp_outer
    further = target.predicted
    embedding = units.embedding_forward + outer / 2, units.embedding_backward + outer / 2
    head = units.head_forward + units.exchanged.tp_head, units.head_backward + outer / 2
    heads = tuple((1 + further) * each + further * part for each, part in zip(head, _passes(block), strict=True))
    shown = _shown(layouts, replica, units, block) if target.is_literal else None
    stages = _stages(layouts, _passes(block), embedding, (heads[0], heads[1]), shown)
    message = border_seconds(target, layouts)
    hidden = 0.0 if target.legacy or target.is_literal else target.values["overlap.border"]
    hoisted = _hoisted(layouts, block) if target.is_literal else 0.0
    run = on_shared_processors(target, layouts, stages, message, hidden, hoisted)
    still = on_shared_processors(target, layouts, stages, np.zeros_like(message), hidden, hoisted)
    inner, tail = sum(stages.inner), sum(stages.last)
    slow_last = (tail >= sum(stages.first)) & (tail >= inner) & ~lone
    slow_first = ~slow_last & (sum(stages.first) >= inner)
    has_head = lone | np.where(layouts.head_first, slow_first, slow_last)
    blocks = np.where(slow_last, layouts.last, np.where(slow_first | lone, layouts.first, layouts.most))
    blocks = blocks + further * has_head
    has_embedding = slow_first | lone
    front, behind = (
        np.where(has_head, (1 + further) * head, 0.0) + np.where(has_embedding, embedding, 0.0)
        for head, embedding in (
            (units.head_forward, units.embedding_forward),
            (units.head_backward, units.embedding_backward),
        )
    )
    outside = front + behind
    at_head = outer / 2 + units.exchanged.tp_head
    sides = np.where(has_head, (1 + further) * at_head, 0.0) + np.where(has_embedding, outer, 0.0)
    turns = np.zeros_like(blocks) if shown is None else sum(shown.inner)
    if shown is not None:
        turns = np.where(slow_last, sum(shown.last), np.where(has_embedding, sum(shown.first), turns))
    working = m * (blocks * block.whole + outside + sides + turns)
    summed = step_exposed(target, layouts, replica, stages, units, busy_behind(layouts, block))
    if shown is not None:
        summed = summed + shown.step
    optimizer = replica.optimizer
    return Times(
        step=run + summed + optimizer,
        compute=m * (blocks * (block.forward + block.backward) + outside),
        forward=m * (blocks * block.forward + front),
        again=m * blocks * block.again,
        tp=m * (blocks * block.tp + sides),
        cp=m * blocks * block.cp,
        ep=m * blocks * block.ep,
        dp=m * (blocks * block.sharded + turns) + summed,
        pp=run - still,
        bubble=np.maximum(still - working, 0.0),
        optimizer=optimizer,
        other=m * blocks * block.host + np.minimum(still - working, 0.0),
    )


def _shown(layouts: Layouts, replica: Replicas, units: Units, block: Block) -> Slots:
    """What ZeRO-2 and 3 of the literal program show in a micro-batch."""
    outer = units.exchanged.tp_outer / 2
    seen = dataclasses.replace(
        units,
        embedding_forward=units.embedding_forward + outer,
        embedding_backward=units.embedding_backward + outer,
        head_backward=units.head_backward + outer,
    )
    return slots(layouts, replica, seen, Room(block.ahead, block.whole - block.ahead, _hoisted(layouts, block)))


def busy_behind(layouts: Layouts, block: Block) -> Array:
    """A block's backward with what it computes again, without what ZeRO adds."""
    return np.asarray(block.whole - block.sharded - block.front)


def _hoisted(layouts: Layouts, block: Block) -> Array:
    """What the literal program recomputes of a backward while it waits for the cotangent: the stage's last block."""
    full = layouts.recompute == RECOMPUTES.index(Recompute.FULL)
    return np.asarray(np.where(full, block.front - block.host / 3, 0.0))


def _passes(block: Block) -> Pair:
    return block.ahead, block.whole - block.ahead


def _stages(layouts: Layouts, block: Pair, embedding: Pair, head: Pair, shown: Slots | None) -> Stages:
    first, early, inner, last, whole = [], [], [], [], []
    total = layouts.first + np.where(layouts.pp > 1, layouts.last, 0.0)
    between, folded = np.maximum(layouts.pp - 2, 0), layouts.head_first & (layouts.pp > 1)
    for each, (one, start, end) in enumerate(zip(block, embedding, head, strict=True)):
        first.append(layouts.first * one + start + folded * end)
        early.append(layouts.ahead * one)
        inner.append(layouts.most * one)
        last.append(layouts.last * one + ~folded * end)
        whole.append((total + layouts.inner) * one + start + end)
        if shown is not None:
            first[-1] = first[-1] + shown.first[each]
            early[-1] = early[-1] + (layouts.place - 1) * shown.inner[each]
            inner[-1] = inner[-1] + shown.inner[each]
            last[-1] = last[-1] + shown.last[each]
            outer = shown.first[each] + np.where(layouts.pp > 1, shown.last[each], 0.0)
            whole[-1] = whole[-1] + outer + between * shown.inner[each]
    pairs = ((each[0], each[1]) for each in (first, early, inner, last, whole))
    return Stages(*pairs)


def border_seconds(target: Target, layouts: Layouts) -> Array:
    """A message between stages: its tokens are cut over tp under sequence parallel, and by usual stacks always."""
    tokens = layouts.micro * target.sequence / layouts.cp
    cut = np.where((layouts.sequence > 0) | (not target.is_literal), layouts.tp, 1.0)
    num_bytes = tokens * target.shapes.hidden * target.stored / cut
    return message_seconds(target, num_bytes, layouts.stride(Axis.PP), layouts.pp)


def _smooth(busy: Array, host: Array) -> Array:
    """The larger of two, rounded where they meet: short gaps remain while neither is far behind."""
    larger = np.maximum(np.maximum(busy, host), 1e-12)
    return np.asarray(larger * ((busy / larger) ** 6 + (host / larger) ** 6) ** (1 / 6))
