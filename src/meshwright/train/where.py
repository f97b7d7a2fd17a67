"""Where a rank is: its phase while a step goes on, and the very action when something goes wrong."""

from __future__ import annotations

from meshwright.launch.status import RankStatus
from meshwright.parallel.engine import Engine
from meshwright.plan.action import Action, Phase
from meshwright.plan.folds.words import in_words
from meshwright.plan.program import program

__all__ = ["Phases", "where"]


class Phases:
    """An engine's observer: keeps the rank's status at the phase of the step. A killed rank leaves it behind."""

    def __init__(self, status: RankStatus, step: int) -> None:
        self._status, self._step = status, step
        self._phase: Phase | None = None

    def __call__(self, action: Action) -> None:
        if action.phase is not self._phase:
            self._phase = action.phase
            self._status.at(self._step, action.phase.value)


def where(engine: Engine) -> str:
    """The action in work, in words: "backward of micro-batch 1, layer 3"; empty between steps."""
    kind, index = engine.position
    if index < 0:
        return ""
    steps = program(engine.plan, engine.mesh.rank, kind)
    return in_words(engine.plan, steps, steps.actions[index])
