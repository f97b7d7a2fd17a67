"""The two calls of `meshwright.checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.checkpoint.loader import load as load_into
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.saver import Progress, Saver
from meshwright.comm.agree import Side
from meshwright.parallel.engine import Engine

__all__ = ["load", "save"]


def save(
    engine: Engine,
    folder: str | Path,
    step: int,
    samples: int,
    *,
    keep: int = 2,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save `engine` after `step` completed steps as `folder`/checkpoints/step-..; returns when it is on disk.

    All ranks call it. `samples` consumed and `extra`, small state of the caller as JSON values, come back from `load`;
    the newest `keep` checkpoints stay. Raises SaveError on all ranks.
    """
    saver = Saver(engine, folder, keep=keep, asynchronous=False)
    try:
        saver.save(Progress(step, samples, extra or {}))
    finally:
        saver.close()


def load(engine: Engine, address: str | Path) -> Manifest:
    """Fill `engine` from a checkpoint of any layout: a step folder, a run folder (its newest), or an fsspec address.

    All ranks call it. Returns the manifest: `step`, `samples`, `extra`. Raises DamagedError naming file, tensor and
    both digests, CheckpointError where the checkpoint is of another model.
    """
    side = Side()
    try:
        return load_into(engine, address, side)
    finally:
        side.close()
