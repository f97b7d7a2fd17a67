"""B56: frozen weights and adapters through a file and back, from pieces. Frozen ones have no master to restore."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.parallel.data_parallel import DataParallel, data_parallel
from meshwright.testing.ranks import run_cases
from tests.ranks.parallel import modules
from tests.ranks.parallel.modules import adapted_blocks, adapted_loss, frozen_below, plain_loss


@dataclass(frozen=True)
class Case:
    case: modules.Case
    folder: Path


class Training:
    """A module, its pieces, their optimizer."""

    def __init__(self, case: modules.Case, values: dict[str, Tensor] | None = None) -> None:
        self.case = case
        self.module = case.build().double()
        if values is not None:
            self.module.load_state_dict(values, strict=False)  # a tied tensor stands in the file once
        self.parallel: DataParallel = data_parallel(self.module, case.mesh, zero=case.zero)
        self.optimizer = torch.optim.AdamW(self.parallel.parameter_groups(0.1), lr=0.05)

    def steps(self, rank: int, first: int, last: int) -> None:
        for step in range(first, last):
            self.parallel.backward(self.case.loss(self.module, rank, step, 0))
            self.parallel.step(self.optimizer, clip_norm=0.5)

    def whole(self) -> dict[str, Tensor]:
        with self.parallel.gathered() as module:
            return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def comes_back(rank: int, given: Case) -> None:
    case, folder = given.case, given.folder
    torch.manual_seed(0)
    first = Training(case)
    start = first.whole()
    frozen = {name for name, parameter in first.module.named_parameters() if not parameter.requires_grad}
    assert frozen
    first.steps(rank, 0, 5)
    saved = first.whole()
    unmoved = {name for name in saved if torch.equal(saved[name], start[name])}
    assert unmoved == frozen | ({"never"} & saved.keys()), "frozen weights stay, and nothing else but what nobody uses"
    if rank == 0:
        save_file(saved, folder / "weights")
    torch.save(first.optimizer.state_dict(), folder / f"optimizer-{rank}")
    trained = sum(values.numel() for name, values in saved.items() if name not in frozen)
    held = torch.tensor(sum(state["exp_avg"].numel() for state in first.optimizer.state.values()))
    dist.all_reduce(held)
    assert int(held) == trained, "state of a frozen element"

    read = load_file(folder / "weights")
    assert all(read[name].shape == values.shape and values.numel() for name, values in saved.items())
    torch.manual_seed(7)
    second = Training(case, read)
    second.optimizer.load_state_dict(torch.load(folder / f"optimizer-{rank}"))
    assert same(second.whole(), saved)
    first.steps(rank, 5, 7)
    second.steps(rank, 5, 7)
    assert same(second.whole(), first.whole())
    assert not same(second.whole(), saved)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_frozen_weights_and_adapters_come_back(tmp_path: Path) -> None:
    kinds: list[tuple[str, object, object]] = [
        ("frozen", frozen_below, plain_loss),
        ("adapters", adapted_blocks, adapted_loss),
    ]
    cases = []
    for name, build, loss in kinds:
        for zero in (1, 3):
            folder = tmp_path / f"{name}-{zero}"
            folder.mkdir()
            cases.append(Case(modules.Case(name, 2, zero, build, loss), folder))  # type: ignore[arg-type]
    run_cases(comes_back, 2, cases, timeout=90)
