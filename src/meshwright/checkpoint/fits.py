"""Whether a checkpoint holds what a model asks for: before anything is read, moved or written."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.checkpoint.errors import CheckpointError, spelled
from meshwright.checkpoint.folder import load_manifest
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.plans import plan_from
from meshwright.checkpoint.state import is_bias, shapes
from meshwright.checkpoint.storage import Storage
from meshwright.checkpoint.subject import Known
from meshwright.plan.plan import Plan

__all__ = ["check_fits", "has_states", "planned_checkpoint"]


def planned_checkpoint(storage: Storage, path: str) -> tuple[Manifest, Plan]:
    """The manifest of a checkpoint and the plan it was saved under, which asks for the tensors that are there.

    Raises DamagedError, and CheckpointError where plan and tensors are of two models.
    """
    manifest = load_manifest(storage, path)
    where = storage.where(path)
    plan = plan_from(manifest.plan, where)
    check_fits(manifest, shapes(plan), where)
    return manifest, plan


def check_fits(manifest: Manifest, known: Known, where: str) -> None:
    """Raises CheckpointError where the tensors are not those that are `known`: by name, by shape. States that nobody
    knows are left out, weights are not; biases of routers start at zero where there are none."""
    saved = {tensor.name: tensor.shape for tensor in manifest.tensors}
    states = has_states(manifest, known)
    biases = {name for name in saved if is_bias(name)}
    asked = biases | {name for name in known if "/" not in name or (states and not is_bias(name))}
    wanted = {name: shape for name, (shape, _) in known.items() if name in asked}
    if lacking := [name for name in wanted if name not in saved]:
        raise CheckpointError(f"{where}: has no {lacking[0]} ({len(lacking)} tensors of this model are not in it)")
    if foreign := [name for name in saved if "/" not in name and name not in known]:
        raise CheckpointError(
            f"{where}: holds {spelled(foreign[0])} ({len(foreign)} tensors of it are not in this model)"
        )
    for name, shape in wanted.items():
        if saved[name] != shape:
            raise CheckpointError(f"{where}: {name} has shape {list(saved[name])}, this model's has {list(shape)}")


def has_states(manifest: Manifest, known: Known) -> bool:
    """Whether the checkpoint has the states of this optimizer: imported weights and another rule's have not."""
    return _kinds(known) <= _kinds(tensor.name for tensor in manifest.tensors)


def _kinds(names: Iterable[str]) -> set[str]:
    """Which states of an optimizer there are."""
    return {name.partition("/")[0] for name in names if "/" in name and not is_bias(name)}
