"""The tape of a block's forward (`block_tape.py`): what it leaves is what is kept for its backward, and its output."""

from __future__ import annotations

from meshwright.arch.block_tape import BlockTape
from meshwright.arch.crossing import CoreTape

__all__ = ["BlockForward"]


class BlockForward(BlockTape):
    """A forward that keeps what a backward needs."""

    def passing(self) -> int:
        """Bytes at the fullest moment, beyond what is kept and what leaves the block."""
        kept = sum(size for name, size in self._kept.items() if name != "input")
        self._enter("attention_norm.")
        self._attend()
        self._join("attention_dropout")
        self._enter("mlp_norm.")
        if self._experts is None:
            self._feed()
        else:
            self._route()
        self._join("mlp_dropout")
        return max(self._tape.peak - kept - self._part, 0)

    def _enter(self, norm: str) -> None:
        """The stream, normed, to all columns."""
        self._tape.come(self._sizes(norm + "scale", norm + "mean"), self._raised, self._part)
        self._tape.go(self._raised)
        if self._setting.gathers:
            self._tape.come(self._whole)

    def _attend(self) -> None:
        tape, arch = self._tape, self._arch
        tape.come(self._query, 2 * self._key)
        if self._setting.selective:
            tape.go(self._part)
        turned = self._turn()
        if self._core is not None:
            self._attend_across(self._core, turned)
            return
        tape.come(self._mask, self._query, self._scores)
        if self._remakes_core:
            tape.go(self._mask, self._scores, turned)
        self._leave_rows()
        if self._remakes_core:
            tape.go(self._query)
        elif turned and not arch.qk_norm and self._setting.ways == 1:
            tape.go(turned)  # as large as what it was made from, which nobody keeps

    def _attend_across(self, core: CoreTape, turned: int) -> None:
        """Over a context axis: of queries, keys and values as they were made only what it packed is kept."""
        tape, arch = self._tape, self._arch
        core.forward()
        exchanged = core.crossing.ulysses > 1
        if turned:
            tape.go(self._key, self._query if exchanged else 0)
        self._leave_rows()
        products = self._query + 2 * self._key - self._sizes("attention.unpacked")
        if arch.qk_norm:
            products -= self._query + self._key  # what the norms read
        elif not turned and not exchanged:
            products -= self._query
        tape.go(products)

    def _leave_rows(self) -> None:
        """A product whose sum over the tensor axis is part of the stream."""
        if self._setting.rings:
            self._tape.come(3 * self._part)
            self._tape.go(2 * self._part)
            return
        self._tape.come(self._whole)
        if self._setting.gathers:
            self._tape.come(self._part, self._arriving)
            self._tape.go(self._arriving, self._whole)

    def _join(self, dropout: str) -> None:
        """A branch falls in part, and is added to the stream."""
        tape, selective = self._tape, self._selective if dropout == "mlp_dropout" else self._setting.selective
        if self._setting.gathers and not selective:
            tape.go(self._part)  # what was gathered
        if self._arch.dropout:
            tape.flash(8 * self._elements)  # random numbers: two of 32 bits in each of 64, twice (`model/dropout.py`)
            tape.come(self._sizes(dropout), 2 * self._part)
            tape.go(2 * self._part)
        tape.flash(self._part)

    def _feed(self) -> None:
        tape, factors = self._tape, 2 if self._arch.gated else 1
        tape.come(factors * self._wide)
        if self._selective:
            tape.go(self._part)
        tape.come(factors * self._wide)
        if self._selective:
            tape.go((factors - 1) * self._wide)
        self._leave_rows()
        if self._selective:
            tape.go(self._wide)

    def _route(self) -> None:
        tape, factors = self._tape, 4 if self._arch.gated else 2
        copied = self._whole if self._setting.ways > 1 and not self._setting.gathers else 0
        tape.come(copied)  # for all columns, beside what the norm made
        tape.flash(self._raised_whole)
        tape.come(self._sizes("mlp.router."), self._rows)
        self._travel(self._rows, self._here)
        tape.come(factors * self._wide, self._here)
        self._travel(self._here, self._rows)
        tape.come(2 * self._rows, self._whole)
        tape.go(self._rows)
        if self._beside:
            tape.come(factors * self._beside, 2 * self._whole)
            tape.go(2 * self._whole)
        if self._setting.ways > 1:
            tape.come(self._part, self._arriving)
            tape.go(self._arriving, self._whole)
        tape.go(self._rows, copied)
