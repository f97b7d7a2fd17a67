"""A small engine on one process, and checkpoints of it made in milliseconds."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from meshwright.arch.arch import Arch
from meshwright.checkpoint.folder import Folder
from meshwright.checkpoint.saver import Progress, Saver
from meshwright.checkpoint.storage import At, nothing
from meshwright.comm.agree import Side
from meshwright.comm.mesh import Mesh
from meshwright.parallel.engine import Engine
from meshwright.plan.plan import Plan
from meshwright.verify.batches import global_batches
from tests.ranks.checkpoint.layouts import LAYOUTS

BLOCK = 4096


@lru_cache(maxsize=1)
def plan_of() -> Plan:
    return replace(
        LAYOUTS[0].plan,
        arch=Arch("llama", 2, 24, 4, 2, 8, 40, 67),
        pipeline=replace(LAYOUTS[0].plan.pipeline, stages=(2,)),
    )


def engine_of(steps: int = 1) -> Engine:
    """An engine after some steps, so that no state is zero."""
    plan = plan_of()
    engine = Engine(plan, Mesh(1).start())
    for batch in global_batches(plan, steps):
        engine.step(batch, 0.05)
    return engine


def saver_of(
    engine: Engine,
    root: Path | str,
    at: At = nothing,
    *,
    keep: int = 2,
    asynchronous: bool = False,
) -> Saver:
    return Saver(engine, Folder(root, at), keep=keep, asynchronous=asynchronous, side=Side(), block_bytes=BLOCK)


def save(engine: Engine, root: Path | str, step: int = 1, keep: int = 2) -> Path:
    """A checkpoint of `engine`; returns its folder."""
    saver_of(engine, root, keep=keep).save(Progress(step, step * 12))
    return Path(root) / "checkpoints" / f"step-{step:08d}"


def values_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds, copied."""
    from meshwright.checkpoint.engine import EngineSubject

    return {piece.tensor: view.clone() for piece, view in EngineSubject(engine).views().items()}


def scramble(engine: Engine) -> None:
    """Nothing of what was there stays."""
    for store in engine.stores:
        store.master.fill_(torch.nan)
        for run in store.runs:
            for state in run.state:
                state.fill_(torch.nan)
