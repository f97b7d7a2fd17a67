"""Bytes that come and go while something runs, in order, and the most that was there at a time."""

from __future__ import annotations

__all__ = ["Tape"]


class Tape:
    """A sum that remembers its largest value. It starts at nothing, and falls below where what was kept is given back.

    live    bytes there now
    peak    the most since the start, or since `begin_anew`
    """

    def __init__(self) -> None:
        self.live = self.peak = 0

    def come(self, *sizes: int) -> None:
        """These appear, and stay."""
        self.live += sum(sizes)
        self.peak = max(self.peak, self.live)

    def go(self, *sizes: int) -> None:
        """These are given back."""
        self.live -= sum(sizes)

    def flash(self, *sizes: int) -> None:
        """These appear together, and are given back at once."""
        self.come(*sizes)
        self.go(*sizes)

    def begin_anew(self) -> int:
        """The most so far. What follows is measured from what is there now on."""
        most, self.peak = self.peak, self.live
        return most
