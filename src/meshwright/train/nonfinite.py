"""Which rank and which tensor made a step's gradient not finite.

The step has been refused by then and no weight was touched, so the same step is run again with an observer: every
bucket is looked at just before it is summed, while it still holds this rank's own gradient. Nothing is paid before a
failure, and a fault that does not come back is told as one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.arch.parameters import tensors
from meshwright.comm.gather import gather_text
from meshwright.data import Batch
from meshwright.parallel.engine import Engine
from meshwright.parallel.store import Store
from meshwright.plan.action import Action, Op, What

__all__ = ["Blame", "NonfiniteError", "blame"]


class NonfiniteError(ArithmeticError):
    """A gradient was not finite, and the run stops: the weights are those before the step. Or a model's logits were."""


@dataclass(frozen=True, slots=True)
class Blame:
    """The first tensor that backward met on each rank whose own gradient is not finite: rank -> its name.

    What it met first of all stands first: from there it went on, over the borders of stages to other ranks as well.
    """

    tensors: dict[int, str]

    def __str__(self) -> str:
        if not self.tensors:
            return (
                "no rank's own gradient is at fault: in a second pass over the same samples each was finite "
                "(the norm overflowed, or a fault that does not come back: memory, hardware)"
            )
        rank, tensor = next(iter(self.tensors.items()))
        others = [str(other) for other in self.tensors if other != rank]
        also = f" (and on rank {', '.join(others)})" if others else ""
        return f"the gradient of {tensor} is the first that is not finite, on rank {rank}{also}"


def blame(engine: Engine, batch: Batch, learning_rate: float) -> Blame:
    """Run a refused step once more and look. Collective over all ranks."""
    look = _Look(engine)
    engine.observe(look.before)
    try:
        engine.step(batch, learning_rate)
    finally:
        engine.observe(None)
    found = {rank: name for rank, name in enumerate(gather_text(engine.mesh, look.found)) if name}
    return Blame(dict(sorted(found.items(), key=lambda item: (-look.order[item[1]], item[0]))))


class _Look:
    def __init__(self, engine: Engine) -> None:
        self._stores = engine.stores
        self.order = {tensor.name: place for place, tensor in enumerate(tensors(engine.plan.arch))}
        self._summed: set[int] = set()
        self.found = ""

    def before(self, action: Action) -> None:
        if self.found:
            return
        if action.op is Op.SUM and action.what is What.GRADIENT:
            self._summed.add(action.bucket)
            store = self._stores[action.bucket]
            if action.group is store.group.name:  # later sums add up what others have given already
                self._look_at(store)
        elif action.op is Op.NORM:
            for store in reversed(self._stores):
                if store.bucket.index not in self._summed and store.bucket.trainable:
                    self._look_at(store)

    def _look_at(self, store: Store) -> None:
        gradient = store.seal()
        # A backward pass meets the tensor that is used last first.
        backwards = sorted(store.bucket.segments, key=lambda segment: self.order[segment.name], reverse=True)
        for segment in backwards:
            if not self.found and not bool(torch.isfinite(gradient[segment.offset : segment.stop]).all()):
                self.found = segment.name
