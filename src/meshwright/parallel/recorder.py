"""When a rank was in which action of a step, by the host's clock."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

from meshwright.parallel.engine import Engine
from meshwright.plan.action import Action
from meshwright.plan.folds.simulate import Span

__all__ = ["recorded"]

Result = TypeVar("Result")


def recorded(engine: Engine, step: Callable[[], Result]) -> tuple[Result, tuple[Span, ...]]:
    """Run `step`, one training step of `engine`, and the span of each of its actions: where one ends the next begins.

    Seconds of `time.perf_counter`, one clock for all processes of a machine. On a device that computes by itself these
    are the times at which work was handed to it. Takes the place of the engine's observer.
    """
    begun: list[float] = []

    def before(_: Action) -> None:
        begun.append(perf_counter())

    engine.observe(before)
    try:
        result = step()
    finally:
        engine.observe(None)
    edges = [*begun, perf_counter()]
    return result, tuple(Span(index, edges[index], edges[index + 1]) for index in range(len(begun)))
