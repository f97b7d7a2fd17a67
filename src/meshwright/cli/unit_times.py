"""Seconds of units of a model on this device, measured by running its own program on one rank. Torch when it runs.

The steps of the smallest run that says it: two blocks, one rank, two micro-batches a step; each rank of the machine
takes them for itself, all at the same time, so that what they share is shared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.parallel.engine import Engine
    from meshwright.plan.action import Action
    from meshwright.plan.plan import Plan
    from meshwright.price.calibration import UnitTime

__all__ = ["attention_times", "unit_times"]

_STEPS = 6


def unit_times(plan: Plan, agreed: Callable[[float], float]) -> Iterator[UnitTime]:
    """Forward and backward of embedding, block and head on a micro-batch, and the update of the whole model.

    `plan` is for one rank; `agreed` makes one figure of all ranks' and lets none run ahead.
    """
    import numpy as np

    from meshwright.comm.mesh import Mesh
    from meshwright.data.batch import Batch
    from meshwright.parallel.engine import Engine
    from meshwright.price.calibration import UnitTime

    engine = Engine(plan, Mesh.of(plan), "cpu")
    length, vocab = plan.data.sequence_length, plan.arch.vocab
    words = np.random.default_rng(0).integers(0, vocab, size=(plan.batch.sequences, length + 1))
    batch = Batch.of_tokens(words)
    laps = _Laps(plan)
    for step in range(_STEPS):
        agreed(0.0)
        engine.observe(laps.begin if step else None)
        engine.step(batch, 1e-4)
        laps.end()
    tokens = plan.batch.micro * length
    for unit in ("embedding", "block", "head"):
        forward, backward = (agreed(laps.seconds(unit, way)) for way in ("forward", "backward"))
        yield UnitTime(unit, tokens, forward, backward)
    yield UnitTime("update", _elements(engine), agreed(laps.update_seconds), 0.0)


def attention_times(plan: Plan, agreed: Callable[[float], float]) -> UnitTime:
    """The core alone: fused attention on the heads and the length of `plan`, forward and backward."""
    import torch

    from meshwright.price.calibration import UnitTime

    arch, length = plan.arch, plan.data.sequence_length
    shape = (plan.batch.micro, arch.heads, length, arch.head_dim)
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    ahead, behind = [], []
    for _ in range(_STEPS):
        agreed(0.0)
        begin = time.perf_counter()
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        middle = time.perf_counter()
        out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
        ahead.append(middle - begin)
        behind.append(time.perf_counter() - middle)
    return UnitTime("attention", plan.batch.micro * length, agreed(median(ahead)), agreed(median(behind)))


def _elements(engine: Engine) -> int:
    return sum(store.bucket.numel for store in engine.stores)


class _Laps:
    """Seconds between the actions of steps."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._spent: dict[tuple[str, str], list[float]] = {}
        self._updates: list[float] = []
        self._now: tuple[Action, float] | None = None
        self._update = 0.0

    def begin(self, action: Action) -> None:
        self._close()
        self._now = action, time.perf_counter()

    def end(self) -> None:
        self._close()
        if self._update:
            self._updates.append(self._update)
        self._update = 0.0

    def seconds(self, unit: str, way: str) -> float:
        return median(self._spent[unit, way])

    @property
    def update_seconds(self) -> float:
        return median(self._updates)

    def _close(self) -> None:
        from meshwright.plan.action import Op

        if self._now is None:
            return
        action, begin = self._now
        seconds = time.perf_counter() - begin
        self._now = None
        if action.op in (Op.UPDATE, Op.NORM):
            self._update += seconds
        elif action.op in (Op.FORWARD, Op.BACKWARD):
            kind: Any = self._plan.arch.unit_kind(action.unit)
            way = "forward" if action.op is Op.FORWARD else "backward"
            self._spent.setdefault((kind.value, way), []).append(seconds)
