"""The two calls of `meshwright.checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.engine import subject_of
from meshwright.checkpoint.loader import load as load_into
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.module import ModuleSubject
from meshwright.checkpoint.saver import Progress, Saver
from meshwright.checkpoint.subject import Subject
from meshwright.comm.agree import Side
from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.engine import Engine

__all__ = ["load", "save"]


def save(
    trained: Engine | DataParallel,
    folder: str | Path,
    step: int,
    samples: int,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    keep: int = 2,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save after `step` completed steps as `folder`/checkpoints/step-..; returns when it is on disk.

    All ranks call it. `trained` is an engine, or what `data_parallel` returned, with the torch `optimizer` of its
    pieces. `samples` consumed and `extra`, small state of the caller as JSON values, come back from `load`; the newest
    `keep` checkpoints stay. Raises SaveError on all ranks.
    """
    saver = Saver(_subject(trained, optimizer), folder, keep=keep, asynchronous=False)
    try:
        saver.save(Progress(step, samples, extra or {}))
    finally:
        saver.close()


def load(
    trained: Engine | DataParallel, address: str | Path, *, optimizer: torch.optim.Optimizer | None = None
) -> Manifest:
    """Fill what `save` takes from a checkpoint of any layout: a step folder, a run folder (its newest), or an fsspec
    address.

    All ranks call it, outside of `gathered`. Returns the manifest: `step`, `samples`, `extra`. Raises DamagedError
    naming file, tensor and both digests, CheckpointError where the checkpoint is of another model.
    """
    side = Side()
    try:
        return load_into(_subject(trained, optimizer), address, side)
    finally:
        side.close()


def _subject(trained: object, optimizer: torch.optim.Optimizer | None) -> Subject:
    if isinstance(trained, DataParallel):
        return ModuleSubject(trained, optimizer)
    if optimizer is not None:
        raise ValueError("an engine has its own optimizer: optimizer= goes with what data_parallel returned")
    if not isinstance(trained, Engine):
        kind = type(trained).__name__
        raise TypeError(f"a {kind} is neither an engine nor what data_parallel returned: these are saved and loaded")
    return subject_of(trained)
