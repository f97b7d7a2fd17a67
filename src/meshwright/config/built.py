"""Which parts run so far: the one list. A key of a part that is not built is accepted at the values below, and refused
otherwise.

A part that is built loses its line here, and nothing else changes. Only commands that run something call
``check_built``, and only engines refuse plans (`parallel.support`): prices are told for what does not run yet, and say
so (`plan.unbuilt`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.config.choices import Dtype, OnNonfinite, OptimizerKind
from meshwright.config.errors import RequestError
from meshwright.config.problems import shown
from meshwright.config.schema import RunConfig

__all__ = ["UNBUILT", "Unbuilt", "check_built", "unbuilt"]


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """A key whose part does not run yet: its ``section.key``, what the part is called, and the values that do run.

    Without values only the key's default runs.
    """

    key: str
    part: str
    runs: tuple[object, ...] = ()


UNBUILT: tuple[Unbuilt, ...] = (
    Unbuilt("moe.statistic", "statistics of the global batch, one step late,"),
    Unbuilt("moe.capacity", "dropping tokens beyond a capacity"),
    Unbuilt("optimizer.kind", "this optimizer", (OptimizerKind.ADAMW, OptimizerKind.SGD)),
    Unbuilt("precision.compute", "float8", (Dtype.FLOAT64, Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16)),
    Unbuilt("survive.heartbeat_seconds", "surviving failures"),
    Unbuilt("survive.restarts", "surviving failures"),
    Unbuilt("survive.on_loss", "surviving failures"),
    Unbuilt("survive.on_nonfinite", "going back to a checkpoint", (OnNonfinite.STOP, OnNonfinite.SKIP)),
    Unbuilt("track.tensorboard", "TensorBoard"),
    Unbuilt("track.wandb", "Weights & Biases"),
)


def check_built(run: RunConfig) -> None:
    """Raise a ``RequestError`` that names every key of ``run`` whose part does not run yet."""
    given = run.tables()
    problems = []
    for entry, value in unbuilt(lambda key: _value(given, key)):
        works = [f"{entry.key} = {shown(each)}" for each in _runs(entry) if each is not None]
        problems.append(RequestError(f"{entry.key} = {shown(value)}", f"{entry.part} is not built yet", works))
    if problems:
        raise RequestError.joined(problems)


def unbuilt(value_of: Callable[[str], object]) -> Iterator[tuple[Unbuilt, object]]:
    """The entries whose key has a value that does not run, and that value; None is a key that is not given."""
    for entry in UNBUILT:
        value = value_of(entry.key)
        if value is not None and value not in _runs(entry):
            yield entry, value


def _runs(entry: Unbuilt) -> tuple[object, ...]:
    return entry.runs or (_value(RunConfig().tables(), entry.key),)


def _value(tables: Mapping[str, Any], key: str) -> object:
    section, name = key.split(".")
    return tables[section].get(name)
