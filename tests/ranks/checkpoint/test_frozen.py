"""Modules under `data_parallel` with frozen parameters: saved, loaded and carried to other stages and numbers of ranks.

Frozen weights have no optimizer state; they must come back all the same, bit for bit (B56).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright import checkpoint
from meshwright.checkpoint.check import check_checkpoint
from meshwright.checkpoint.errors import CheckpointError
from meshwright.checkpoint.folder import Folder, find_checkpoint
from meshwright.comm.mesh import Mesh
from meshwright.layout.fingerprint import shown
from meshwright.parallel.data_parallel import DataParallel, data_parallel
from meshwright.testing.ranks import run_cases
from tests.ranks.parallel.modules import Loss, adapted_blocks, adapted_loss, frozen_below, plain_loss

STEPS = 5
Built = tuple[DataParallel, torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """How a module is spread."""

    module: str
    dp: int
    zero: int
    within: int = 0

    @property
    def name(self) -> str:
        return f"{self.module}-dp{self.dp}-zero{self.zero}-{self.within}"


MODULES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "adapters": (adapted_blocks, adapted_loss),
    "frozen": (frozen_below, plain_loss),
}
CASES = [Case("adapters", 2, 1), Case("adapters", 2, 3), *(Case("frozen", 2, zero) for zero in (0, 2, 3))]


def built(case: Case, seed: int) -> Built:
    torch.manual_seed(seed)
    module = MODULES[case.module][0]().double()
    parallel = data_parallel(module, Mesh(dp=case.dp, shard_within=case.within).start(), zero=case.zero)
    return parallel, torch.optim.AdamW(parallel.parameter_groups(weight_decay=0.1), lr=0.05)


def trained(built: Built, case: Case, rank: int, first: int, last: int) -> None:
    parallel, optimizer = built
    for step in range(first, last):
        parallel.backward(MODULES[case.module][1](parallel.module, rank, step, 0))
        parallel.step(optimizer)


def values(parallel: DataParallel) -> dict[str, torch.Tensor]:
    with parallel.gathered() as module:
        return {name: each.detach().clone() for name, each in module.named_parameters()}


def save_and_go_on(rank: int, case: Case, root: Path) -> dict[str, list[str]]:
    """Train, save; loaded into a module with other start values, and trained on, it is the one that never stopped."""
    parallel, optimizer = mine = built(case, 0)
    start = values(parallel)
    trained(mine, case, rank, 0, STEPS)
    checkpoint.save(parallel, root / case.name, STEPS, 40, optimizer=optimizer, extra={"note": 7})
    saved = values(parallel)
    trained(mine, case, rank, STEPS, STEPS + 3)

    again, again_optimizer = other = built(case, 1)
    manifest = checkpoint.load(again, root / case.name, optimizer=again_optimizer)
    assert (manifest.step, manifest.samples, manifest.updates, manifest.extra["note"]) == (STEPS, 40, STEPS, 7)
    loaded = values(again)
    frozen = [name for name, each in parallel.module.named_parameters() if not each.requires_grad]
    assert frozen
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert all(torch.equal(start[name], loaded[name]) for name in frozen)
    trained(other, case, rank, STEPS, STEPS + 3)
    went_on, resumed = values(parallel), values(again)
    assert all(torch.equal(went_on[name], resumed[name]) for name in went_on), "resumed bit for bit"
    return {"frozen": frozen, "all": list(saved)}


def carried(rank: int, case: Case, root: Path) -> None:
    """What two ranks saved at stage 3, here; saved anew, it has the fingerprints it had."""
    parallel, optimizer = built(case, 2)
    checkpoint.load(parallel, root / Case(case.module, 2, 3).name, optimizer=optimizer)
    checkpoint.save(parallel, root / f"again-{case.name}", STEPS, 40, optimizer=optimizer)


def prints(root: Path) -> dict[str, str]:
    return {tensor.name: shown(tensor.fingerprint) for tensor in Folder(root).manifest(STEPS).tensors}


@pytest.mark.timeout(300)
def test_frozen_weights_are_carried_and_have_no_state(tmp_path: Path) -> None:
    names = run_cases(save_and_go_on, 2, CASES, tmp_path, timeout=200)[0]
    for case, told in zip(CASES, names, strict=True):
        manifest = Folder(tmp_path / case.name).manifest(STEPS)
        assert check_checkpoint(*find_checkpoint(tmp_path / case.name)).problems == ()
        tensors = {tensor.name for tensor in manifest.tensors}
        states = {f"{key}/{name}" for key in ("exp_avg", "exp_avg_sq") for name in {*told["all"]} - {*told["frozen"]}}
        assert tensors == {*told["all"]} | states
        assert all(piece.rectangle.numel for tensor in manifest.tensors for piece in tensor.pieces)
        assert len(manifest.files) == 2, "both ranks write what they stand for"

    elsewhere = {
        1: [Case("adapters", 1, 0)],
        3: [Case("frozen", 3, 1)],
        4: [Case("adapters", 4, 2, within=2), Case("frozen", 4, 3, within=2)],
    }
    for world, cases in elsewhere.items():
        run_cases(carried, world, cases, tmp_path, timeout=200)
        for case in cases:
            source = prints(tmp_path / Case(case.module, 2, 3).name)
            assert prints(tmp_path / f"again-{case.name}") == source, case.name


def test_another_module_is_refused(tmp_path: Path) -> None:
    parallel, optimizer = built(Case("adapters", 1, 0), 0)
    checkpoint.save(parallel, tmp_path, 1, 1, optimizer=optimizer)
    other, other_optimizer = built(Case("frozen", 1, 0), 0)
    with pytest.raises(CheckpointError, match=r"has no .* tensors of this model are not in it"):
        checkpoint.load(other, tmp_path, optimizer=other_optimizer)
    fresh, fresh_optimizer = built(Case("adapters", 1, 0), 1)
    assert checkpoint.load(fresh, tmp_path, optimizer=fresh_optimizer).updates == 1
