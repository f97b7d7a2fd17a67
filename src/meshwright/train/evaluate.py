"""Evaluation: the mean loss over the whole held-out split, equal on every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.parallel.engine import Engine
from meshwright.train.feed import Feed

__all__ = ["EvalResult", "evaluate"]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """`loss` is the mean over `trained_tokens` labels, in nats; 0 where no label counts."""

    loss: float
    trained_tokens: int


def evaluate(engine: Engine, feed: Feed, told: Callable[[int, int], None] = lambda done, of: None) -> EvalResult:
    """Every sample of the split once, in global batches; sums of losses and counts, divided once.

    Collective over all ranks. `told(done, of)` is called after each batch.
    """
    total, count = 0.0, 0
    for index in range(feed.evaluation_batches):
        part = engine.evaluate(feed.evaluation_batch(index))
        total += part.loss_sum
        count += part.trained_tokens
        told(index + 1, feed.evaluation_batches)
    return EvalResult(total / max(count, 1), count)
