"""A module of any make on one process: what its optimizer has made by then, and number formats of all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright import checkpoint
from meshwright.checkpoint.check import check_checkpoint
from meshwright.checkpoint.errors import CheckpointError
from meshwright.checkpoint.folder import find_checkpoint, load_manifest
from meshwright.checkpoint.module import ModuleSubject
from meshwright.checkpoint.saver import Progress, Saver
from meshwright.comm.agree import Side
from meshwright.comm.mesh import Mesh
from meshwright.parallel.data_parallel import data_parallel


def test_states_that_come_after_the_first_save_are_saved(tmp_path: Path) -> None:
    """Buffers of an asynchronous save were those of the first one: the second failed in the middle of a step."""
    parallel = data_parallel(nn.Linear(3, 2), Mesh(1).start())
    optimizer = torch.optim.AdamW(parallel.parameter_groups(weight_decay=0.1), lr=0.1)
    saver = Saver(ModuleSubject(parallel, optimizer), tmp_path, asynchronous=True, side=Side())
    saver.save(Progress(0, 0))
    parallel.backward(parallel.mean_loss(parallel.module(torch.ones(1, 3)).sum(), 1))
    parallel.step(optimizer)
    saver.save(Progress(1, 1))
    saver.wait()
    names = {each.name for each in load_manifest(*find_checkpoint(tmp_path)).tensors}
    assert {"weight", "exp_avg/weight", "exp_avg_sq/bias"} <= names
    assert not check_checkpoint(*find_checkpoint(tmp_path)).problems


class Table(nn.Module):
    """A frozen table of some format."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values, requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int16, torch.float8_e4m3fn])
def test_a_format_of_any_size_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    """Formats that a manifest had no name for ended in a StopIteration."""
    values = torch.arange(24).reshape(4, 6).to(dtype)
    saved, other = (data_parallel(Table(each), Mesh(1).start()) for each in (values, torch.zeros_like(values)))
    checkpoint.save(saved, tmp_path, 1, 1)
    checkpoint.load(other, tmp_path)
    with other.gathered() as module:
        assert torch.equal(next(module.parameters()).view(torch.uint8), values.view(torch.uint8))


def test_a_format_without_a_name_is_refused_by_name(tmp_path: Path) -> None:
    parallel = data_parallel(Table(torch.zeros(2, dtype=torch.complex64)), Mesh(1).start())
    with pytest.raises(CheckpointError, match=r"a tensor of complex64 cannot be saved; what works: float64, "):
        checkpoint.save(parallel, tmp_path, 1, 1)
