"""From where a run goes on.

    auto       the newest complete checkpoint of the run folder; where it proves damaged, the one before it, and so on.
               An empty folder starts afresh; one with checkpoints of which none can be used is an error, never a
               silent start from zero
    none       afresh: what stands in the folder is moved aside
    a folder   that checkpoint and no other

What decides the loss curve (the plan's `math` hash, the corpus) must be equal unless changes are accepted; the layout
may be any. `look` decides before a rank is started; `resume` loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.checkpoint.errors import CheckpointError, DamagedError
from meshwright.checkpoint.fits import check_fits
from meshwright.checkpoint.folder import CHECKPOINTS, Folder, find_checkpoint, load_manifest, step_of
from meshwright.checkpoint.loader import agreed, load_checkpoint
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.plans import differences
from meshwright.checkpoint.state import shapes
from meshwright.checkpoint.storage import Storage, open_storage
from meshwright.comm.agree import Side
from meshwright.config.choices import Resume
from meshwright.config.errors import RequestError
from meshwright.parallel.engine import Engine
from meshwright.plan.plan import Plan

__all__ = ["Found", "check_continues", "look", "resume"]

_AFRESH = ("checkpoint.resume=none", "another name")


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint to go on from; `skipped` are newer ones that are damaged, one line each."""

    address: str
    path: str
    manifest: Manifest
    skipped: tuple[str, ...] = ()

    @property
    def storage(self) -> Storage:
        return open_storage(self.address)


def look(
    folder: Folder, plan: Plan, wanted: Resume | str, *, corpus: str = "", accept_changes: bool = False,
    worse_than: tuple[str, ...] = (),
) -> Found | None:  # fmt: skip
    """Where a run of `plan` goes on; None: it starts afresh. Reads manifests only.

    `worse_than` are addresses that proved damaged when they were loaded. Raises RequestError where the checkpoint is of
    another run, CheckpointError where there are checkpoints but none can be used.
    """
    if wanted is Resume.NONE:
        return None
    if isinstance(wanted, Resume):
        found = _newest(folder, worse_than)
    else:
        try:
            storage, path = find_checkpoint(wanted)
        except CheckpointError as error:
            raise RequestError(f'checkpoint.resume = "{wanted}"', str(error), ("auto", "none")) from None
        found = Found(storage.address, path, load_manifest(storage, path))
    if found is not None:
        where = found.storage.where(found.path)
        _check_continues(found, plan, corpus, accept_changes, where)
        try:
            check_fits(found.manifest, shapes(plan), where)
        except CheckpointError as error:  # changes were accepted, but this is another model
            raise RequestError(str(error), "no change of that can be accepted", _AFRESH) from None
    return found


def resume(
    engine: Engine,
    folder: Folder,
    wanted: Resume | str,
    side: Side,
    *,
    corpus: str = "",
    accept_changes: bool = False,
    told: Callable[[str], None] = lambda line: None,
) -> Manifest | None:
    """Clean up, choose and load; None: the run starts afresh. Collective; raises what `look` and `load` raise.

    Damage that only loading shows makes `auto` fall back to the checkpoint before; `told` hears of it.
    """
    for line in agreed(side, lambda: folder.clean() if side.rank == 0 else []):
        told(line)
    if wanted is Resume.NONE:
        aside = agreed(side, lambda: folder.set_aside() if side.rank == 0 else None)
        if aside is not None:
            told(f"earlier checkpoints are moved to {aside}")
        return None
    bad: tuple[str, ...] = ()
    heard: set[str] = set()
    while True:
        found = _agreed_choice(side, folder, engine.plan, wanted, corpus, accept_changes, bad)
        if found is None:
            return None
        address, path, lines = found
        for line in lines:
            if line not in heard:
                told(line)
        heard.update(lines)
        storage = open_storage(address)
        try:
            manifest = load_checkpoint(engine, storage, path, side)
        except DamagedError as error:
            if not isinstance(wanted, Resume):
                raise
            told(f"damaged: {error}")
            bad = (*bad, storage.where(path))
            continue
        told(_resumed(manifest, engine.plan, storage.where(path)))
        return manifest


def check_continues(manifest: Manifest, plan: Plan, corpus: str, accept_changes: bool, where: str) -> list[str]:
    """The differences that decide the loss curve. Raises RequestError where there are any and they are not accepted."""
    found = differences(manifest.plan, plan) if manifest.math != plan.math else []
    if manifest.math != plan.math and not found:
        found = [f"math hash: {manifest.math} -> {plan.math}"]
    if corpus and manifest.corpus and manifest.corpus != corpus:
        found.append(f"the text itself: digest {manifest.corpus[:16]} -> {corpus[:16]}")
    if found and not accept_changes:
        listed = "".join(f"\n    {line}" for line in found)
        raise RequestError(
            where,
            f"is of a run that trains differently (saved -> asked):{listed}\n  ",
            ("checkpoint.accept_changes=true", *_AFRESH),
        )
    return found


def _check_continues(found: Found, plan: Plan, corpus: str, accept_changes: bool, where: str) -> None:
    """The same, telling of the newer ones too that are damaged: their run may be the one that was asked for."""
    try:
        check_continues(found.manifest, plan, corpus, accept_changes, where)
    except RequestError as error:
        if not found.skipped:
            raise
        newer = "".join(f"\n    {line}" for line in found.skipped)
        rule = f"{error.rule.rstrip()}\n  and newer ones cannot be used:{newer}\n  "
        raise RequestError(error.value, rule, error.nearest) from None


def _newest(folder: Folder, worse_than: tuple[str, ...]) -> Found | None:
    steps = folder.steps()
    skipped: list[str] = []
    for step in steps:
        where = folder.storage.where(folder.path(step))
        if where in worse_than:
            continue
        try:
            manifest = folder.manifest(step)
            return Found(folder.storage.address, folder.path(step), manifest, (*_lost(folder, step), *skipped))
        except DamagedError as error:
            skipped.append(f"damaged: {error}")
    broken = [folder.storage.where(f"{CHECKPOINTS}/{name}") for name in folder.incomplete()]
    if steps or broken or folder.latest() is not None:
        reasons = [*skipped, *worse_than, *(f"{name}: has no manifest" for name in broken)]
        listed = "".join(f"\n  {reason}" for reason in reasons) or "\n  latest names a checkpoint that is gone"
        raise CheckpointError(
            f"{folder.storage.address} holds checkpoints, but none can be used, and nothing is started anew without "
            f"checkpoint.resume=none:{listed}"
        )
    return None


def _lost(folder: Folder, step: int) -> list[str]:
    """What says that there was a checkpoint later than the newest that has a manifest."""
    lines = [
        f"damaged: {folder.storage.where(f'{CHECKPOINTS}/{name}')}: has no manifest, so it is not complete"
        for name in folder.incomplete()
        if step_of(name) > step
    ]
    try:
        latest = folder.latest()
    except DamagedError as error:
        return [*lines, f"damaged: {error}"]
    if latest is not None and step_of(latest) > step and not folder.storage.names(latest):
        lines.append(f"damaged: {folder.storage.where(latest)}: is gone, and latest names it")
    return lines


def _agreed_choice(
    side: Side, folder: Folder, plan: Plan, wanted: Resume | str, corpus: str, accept_changes: bool,
    bad: tuple[str, ...],
) -> tuple[str, str, list[str]] | None:  # fmt: skip
    """Rank 0 looks, all know: (address, path, what to tell)."""

    def choose() -> bytes:
        if side.rank:
            return b""
        found = look(folder, plan, wanted, corpus=corpus, accept_changes=accept_changes, worse_than=bad)
        return json.dumps(None if found is None else [found.address, found.path, list(found.skipped)]).encode()

    said = json.loads(side.broadcast(agreed(side, choose)))
    return None if said is None else (said[0], said[1], said[2])


def _resumed(manifest: Manifest, plan: Plan, where: str) -> str:
    moved = "" if manifest.layout == plan.layout else ", saved by another layout"
    changed = differences(manifest.plan, plan) if manifest.math != plan.math else []
    changes = "".join(f"\n  accepted: {line}" for line in changed)
    return f"resumed from {where}: step {manifest.step:,}, {manifest.samples:,} samples consumed{moved}{changes}"
