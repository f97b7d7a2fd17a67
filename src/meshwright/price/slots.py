"""What ZeRO's traffic of every micro-batch shows in a slot of each stage of the literal program, over arrays.

Gathers G and sums S of a rank share one communicator, in the order in which they are launched; a unit waits for its
gather, and the sum of the unit before must be over when a backward ends. R is what a backward recomputes first:

    forward    | F1 | F2 | ... | Fn |        F1 ends no sooner than G2, which F1 launched: [G - F]+ a block
               | G2 | G3 | ... |
    backward   | Rn Wn | ... | R1 W1 |       in the slot of a block: the sum of the block after, from its start, then
               | Sn+1 -> Gn-1 | ... |        the gather of the block before, launched where W starts

Where slots meet, units that a stage holds already need no gather, and large sums stand before the first gather:

    1f1b, outer stage  | W1 | E' | E | F1 |  the embedding's sum, launched after E', delays the gather of block 1
                                 | SE -> G1 |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.config.choices import Schedule
from meshwright.price.compute import Units
from meshwright.price.layouts import SCHEDULES, Array, Layouts
from meshwright.price.replicas import Replicas

Pair = tuple[Array, Array]


@dataclass(frozen=True)
class Slots:
    """Exposed seconds of a forward and a backward slot on the first (or only), the fullest inner and the last stage;
    `step`: once a step besides."""

    first: Pair
    inner: Pair
    last: Pair
    step: Array


@dataclass(frozen=True)
class Room:
    """Seconds of a block that hide traffic: its forward, its backward with what it recomputes, the latter alone."""

    forward: Array
    backward: Array
    again: Array


def slots(layouts: Layouts, replica: Replicas, units: Units, room: Room) -> Slots:
    """Of ZeRO-2 and 3; nothing below."""
    runs = _Runs(layouts, replica, units, room)
    gpipe = layouts.schedule == SCHEDULES.index(Schedule.GPIPE)
    lone, used = layouts.pp == 1, (replica.block.fetch > 0) | (replica.block.scatter > 0)

    def chosen(usual: Pair, other: Pair) -> Pair:
        return tuple(np.where(used, np.where(gpipe & ~lone, b, a), 0.0) for a, b in zip(usual, other, strict=True))  # type: ignore[return-value]

    first = tuple(np.where(lone, a, b) for a, b in zip(runs.lone(), runs.first(), strict=True))
    return Slots(
        chosen((first[0], first[1]), runs.first_gpipe()),
        chosen(runs.inner(), runs.inner_gpipe()),
        chosen(runs.last(), runs.last_gpipe()),
        np.where(used, runs.opening(), 0.0),
    )


class _Runs:
    """Steady slots, by stage and schedule."""

    def __init__(self, layouts: Layouts, replica: Replicas, units: Units, room: Room) -> None:
        again = np.where(layouts.reshard > 0, 1.0, 0.0)  # parameters that stay are gathered once a step
        self._layouts, self._replica, self._units, self._room, self._again = layouts, replica, units, room, again
        self._gather, self._sum = replica.block.fetch * again, replica.block.scatter
        self._head, self._table = replica.head.fetch * again, replica.embedding.fetch * again
        self._ahead = _over(self._gather, room.forward)
        self._head_ahead = _over(self._head, room.forward)
        self._behind = self._after(self._sum, self._gather)
        self._turn = _over(self._sum, room.backward)

    def _after(self, before: Array, gather: Array) -> Array:
        """What a block's backward shows of a sum that goes first and a gather that follows."""
        return _over(np.maximum(before, self._room.again) + gather, self._room.backward)

    def _first_gather(self, before: Array | float, inside: Array, gather: Array) -> Array:
        """The first gather of a slot, behind a sum."""
        return np.where(gather > 0, _over(before + gather, inside), 0.0)

    def _downwards(self, top: Array, blocks: Array) -> Array:
        """Backwards of a stage: the last block, those between, the first."""
        return np.asarray(top + np.maximum(blocks - 2, 0) * self._behind + self._turn)

    def _below(self, extra: Array) -> Array:
        """The embedding's backward: the first block's sum, behind a gather that started during that block."""
        backward = np.maximum(self._room.backward, self._sum)
        late = _over(np.maximum(self._sum, self._room.again) + extra, backward)
        return _over(late + self._sum, self._units.embedding_backward)

    def _entry(self) -> Array:
        return self._first_gather(self._replica.embedding.scatter, self._units.embedding_forward, self._gather)

    def _loss(self) -> Array:
        """The head's backward and that of the block below, which the head's sum delays."""
        return _over(self._gather, self._units.head_backward) + self._after(self._replica.head.scatter, self._gather)

    def lone(self) -> Pair:
        blocks = self._layouts.first
        forward = self._entry() + (blocks - 1) * self._ahead + self._head_ahead
        return forward, self._downwards(self._loss(), blocks) + self._below(self._table)

    def first(self) -> Pair:
        blocks, nothing = self._layouts.first, np.zeros_like(self._sum)
        backward = self._downwards(self._after(nothing, self._gather), blocks) + self._below(self._table)
        return self._entry() + (blocks - 1) * self._ahead, backward

    def inner(self) -> Pair:
        blocks, nothing = self._layouts.most, np.zeros_like(self._sum)
        forward = self._first_gather(self._sum, self._room.forward, self._gather)
        return (
            forward + np.maximum(blocks - 2, 0) * self._ahead,
            self._downwards(self._after(nothing, self._gather), blocks),
        )

    def last(self) -> Pair:
        blocks = self._layouts.last
        forward = self._first_gather(self._sum, self._room.forward, self._gather)
        forward = forward + np.maximum(blocks - 2, 0) * self._ahead + self._head_ahead
        return forward, self._downwards(self._loss(), blocks)

    def first_gpipe(self) -> Pair:
        blocks = self._layouts.first
        entry = self._first_gather(0.0, self._units.embedding_forward, self._gather)
        forward = entry + (blocks - 1) * self._ahead + _over(self._table, self._room.forward)
        top = self._after(self._replica.embedding.scatter, self._gather)
        return forward, top + np.maximum(blocks - 1, 0) * self._behind + self._below(self._gather)

    def inner_gpipe(self) -> Pair:
        return self._layouts.most * self._ahead, self._layouts.most * self._behind

    def last_gpipe(self) -> Pair:
        blocks, own = self._layouts.last, self._units
        forward = (blocks - 1) * self._ahead + self._head_ahead + _over(self._gather, own.head_forward)
        loss = _over(self._sum + self._gather, own.head_backward)
        loss = np.where(self._gather > 0, loss, 0.0) + self._after(self._replica.head.scatter, self._gather)
        return forward, loss + np.maximum(blocks - 2, 0) * self._behind + self._after(self._sum, self._head)

    def opening(self) -> Array:
        """The first gathers have nothing to hide behind, and no sum before them."""
        fetch, own = self._replica.block.fetch, self._units
        begin = self._replica.embedding.fetch + _over(fetch, own.embedding_forward)
        stays = (self._layouts.first - 1) * _over(fetch, self._room.forward)
        return np.where(fetch > 0, begin - self._entry() + (1 - self._again) * stays, 0.0)


def _over(seconds: Array, room: Array) -> Array:
    """What does not hide."""
    return np.asarray(np.maximum(seconds - room, 0.0))
