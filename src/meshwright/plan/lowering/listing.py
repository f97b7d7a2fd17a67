"""The growing list of actions, and what is under way in it."""

from __future__ import annotations

from meshwright.plan.action import Action, Op


class Listing:
    """Appends actions; each launched one is waited for exactly once, in the order asked or, at the end, of launch."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._open: dict[int, None] = {}

    def add(self, action: Action) -> int:
        """Append; returns the index by which a wait names it."""
        self.actions.append(action)
        index = len(self.actions) - 1
        if action.launches:
            self._open[index] = None
        return index

    def wait(self, index: int) -> None:
        """End the launch at `index`; nothing to do where it launched nothing or was ended before."""
        if index in self._open:
            del self._open[index]
            launched = self.actions[index]
            self.actions.append(_waiting(launched, index))

    def wait_all(self, *ops: Op) -> None:
        """End every open launch of the given ops (all of them when none is named), first launched first."""
        for index in [i for i in self._open if not ops or self.actions[i].op in ops]:
            self.wait(index)

    def open(self, op: Op) -> list[int]:
        return [index for index in self._open if self.actions[index].op is op]


def _waiting(launched: Action, index: int) -> Action:
    """The end of a launch, which it repeats: `dataclasses.replace` takes five times as long, a third of a lowering."""
    return Action(
        Op.WAIT, launched.phase, launched.unit, launched.micro, launched.bucket, launched.what, launched.group,
        launched.peer, index, launched.keep, launched.split,
    )  # fmt: skip
