"""Attention over a context axis on a block's tape: what its exchanges and its blocks of keys come and go by.

    exchange in    queries, keys and values packed by whom they are for, as they arrive, and joined
    meeting        own block, then others: each leaves an output that is merged, or gradients that are added up
    exchange out   the output cut by whom it is for, as it arrives, and with all heads

In a ring two blocks of others are there at a time, and in backward the gradients of one that leave and arrive. Of the
keys of an earlier part every query sees the first half, of a later part's the second half of the queries sees all; with
masks any of them may see any. The program is `parallel/context*.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.arch.activations import Crossing
from meshwright.arch.tape import Tape

__all__ = ["CoreTape"]


_ALIKE = 3  # steps of a ring one after another: the first, any, the last


class _Step(NamedTuple):
    """A block of others: whether it is the first or the last that is met, and whether all queries see keys of it."""

    first: bool
    last: bool
    all_queries: bool


@dataclass(frozen=True, slots=True)
class CoreTape:
    """Bytes: `query` and `key` of own tokens and all heads, `met` of keys once heads are exchanged, `raised` of queries
    in float32 where lower precisions compute, `scores` of log-sum-exps, `mask` of one block.

    `several`: sequences, which are cut one by one. `direct`: chunks of a scatter arrive side by side. `tiles`: working
    memory of a kernel.
    """

    tape: Tape
    crossing: Crossing
    query: int
    key: int
    met: int
    raised: int
    scores: int
    mask: int
    several: bool
    direct: bool
    tiles: int

    def forward(self) -> None:
        """Leaves what is kept of it, and its output."""
        tape, packed, query = self.tape, self._packed, self.query
        if self._exchanges:
            copies, joined = 2 * self.met if self.met > self.key else 0, packed * self.several
            tape.come(copies, packed, packed, joined)
            tape.go(copies, packed, joined)
        if self.crossing.ring == 1:
            tape.come(self.mask, query, self.scores)
        else:
            tape.come(query * self._exchanges, 2 * self.met)
            tape.come(2 * self.met * self.crossing.ring * self.crossing.gathered)
            self._meet()
            tape.go(2 * self.met * self.crossing.gathered)
        if self._exchanges:
            tape.come(query * self.several, query)
            tape.go(query * self.several)
            tape.come(query)
            tape.go(query, packed * (self.crossing.ring > 1))

    def backward(self, give_back: Callable[[], None]) -> None:
        """From the gradient of its output, which is used up, to those of own queries, keys and values; `give_back`:
        all that forward kept but the output with all heads."""
        tape, query, gathers = self.tape, self.query, self.crossing.gathered
        if self._exchanges:
            tape.come(query, query)
            tape.go(query)
            tape.come(query * self.several)
            tape.go(query * self.several, query)
        if self.crossing.ring == 1:
            tape.come(query, 2 * self.met, self.tiles)
            tape.go(self.tiles)
        else:
            self._meet_again()
        give_back()
        tape.go(query)
        if gathers:
            others = 2 * self.met * (self.crossing.ring - 1)
            tape.come(2 * self.met, others * self.direct)
            tape.go(others * self.direct, 2 * self.met + others)
        if self._exchanges:
            tape.come(self._packed)
            tape.go(query, 2 * self.met)
            tape.come(self._packed * self.several, self._packed)
            tape.go(self._packed * self.several)
            tape.come(query, 2 * self.key)
            tape.go(2 * self._packed)

    @property
    def _exchanges(self) -> bool:
        return self.crossing.ulysses > 1

    @property
    def _packed(self) -> int:
        return self.query + 2 * self.met

    def _meet(self) -> None:
        """Outputs of all blocks, merged."""
        tape, block, rings = self.tape, 2 * self.met, not self.crossing.gathered
        tape.come(block * rings, self.mask, self.query, self.scores)
        tape.go(self.mask)
        if self.raised:
            tape.come(self.raised)
            tape.go(self.query)
        for step in self._steps():
            tape.come(block * (rings and not step.last))
            rows = 1 if step.all_queries else 2
            other, sums = self.query // rows, self.scores // rows
            tape.come(self.mask, other, sums)
            tape.go(self.mask)
            tape.flash(sums, max(sums, self.raised // rows))
            tape.go(other, sums, block * rings)
        if self.raised:
            tape.come(self.query)
            tape.go(self.raised)
        tape.flash(self.scores)

    def _meet_again(self) -> None:
        """Gradients of queries, added up, and of all keys and values, each block's where it belongs."""
        tape, block, rings = self.tape, 2 * self.met, not self.crossing.gathered
        own = block if rings else block * self.crossing.ring
        tape.come(self.scores, own, block * rings)
        tape.come(self.mask, self.query, block, self.tiles)
        tape.go(self.mask, self.tiles)
        if self.raised:
            tape.come(self.raised)
            tape.go(self.query)
        tape.go(block)
        for step in self._steps():
            tape.come(block * (rings and not step.last))
            every = step.all_queries
            rows, keys = 1 if every else 2, 1 if self.mask or not every else 2
            of_query, of_keys, sums = self.query // rows, block // keys, 0 if every else self.scores // rows
            tape.come(self.mask, sums, of_query, of_keys, self.tiles)
            tape.go(self.mask, sums, self.tiles, of_query)
            if rings:
                tape.go(block * (not step.first))  # it has left
                tape.come(block * step.first, block)
            tape.go(of_keys, block * rings)
        if self.raised:
            tape.come(self.query)
            tape.go(self.raised)
        tape.go(self.scores, 2 * block * rings)

    def _steps(self) -> list[_Step]:
        """The blocks of others in the order in which they are met, those of earlier parts first: of runs that are alike
        as many as tell."""
        earlier = self.crossing.place
        met = [True] * min(earlier, _ALIKE) + [self.mask > 0] * min(self.crossing.ring - 1 - earlier, _ALIKE)
        return [_Step(index == 0, index == len(met) - 1, every) for index, every in enumerate(met)]
