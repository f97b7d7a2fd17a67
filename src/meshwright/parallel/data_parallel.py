"""Data parallelism and ZeRO for any module: no sharding table, no plan, the user's own loop and optimizer.

    parallel = data_parallel(module, mesh, zero=3)
    optimizer = torch.optim.AdamW(parallel.parameter_groups(weight_decay=0.1), lr=3e-4)
    for inputs, labels in batches:                      # of this rank
        for part in ...:                                # micro-batches
            parallel.backward(loss(module(part)))
        norm = parallel.step(optimizer, clip_norm=1.0)

Gradients are averaged over the ranks, as users of PyTorch expect; `mean_loss` weighs ragged batches right.

Only here hooks move data: `data_parallel_order` says when. What they move together: `data_parallel_units`. In a mesh
of groups, Mesh(dp=8, shard_within=4), stages 1 to 3 share out inside each group of 4 and keep a copy in every group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.communicator import Communicator
from meshwright.comm.mesh import Mesh
from meshwright.comm.operations import all_reduce
from meshwright.layout.groups import GroupName, groups
from meshwright.optim.update import clip_coefficient, squared_norm
from meshwright.parallel.allocator import Allocator
from meshwright.parallel.data_parallel_order import Order
from meshwright.parallel.data_parallel_units import build_units, find_blocks
from meshwright.parallel.flat import FlatBucket, Replicas
from meshwright.plan.action import Phase

__all__ = ["DataParallel", "data_parallel"]

_APPLIED = "_meshwright_data_parallel"


def data_parallel(
    module: nn.Module, mesh: Mesh, zero: int = 0, units: Sequence[nn.Module] | None = None
) -> DataParallel:
    """Spread `module` over the data axis of a started `mesh`, in place; every rank calls it with an equal module.

    Args:
        zero: 0 everything whole, 1 optimizer state in pieces, 2 gradients too, 3 parameters too.
        units: what is gathered and reduced together, in order of execution; None finds blocks.

    Raises:
        ValueError: a second application, a stage out of range, a mesh with other axes.
    """
    if not 0 <= zero <= 3:
        raise ValueError(f"zero = {zero}: must be 0, 1, 2 or 3")
    if mesh.degrees.ranks != mesh.degrees.dp:
        raise ValueError(f"a mesh of {mesh.degrees}: data_parallel knows only dp; parallelize takes the other axes")
    if getattr(module, _APPLIED, False):
        raise ValueError("data_parallel has been applied to this module already")
    setattr(module, _APPLIED, True)
    return DataParallel(module, mesh, zero, list(units) if units is not None else list(find_blocks(module)))


class DataParallel:
    """What trains a module that `data_parallel` changed; see there."""

    def __init__(self, module: nn.Module, mesh: Mesh, zero: int, units: list[nn.Module]) -> None:
        self.module, self.stage = module, zero
        replicas = _replicas(mesh, zero)
        self._every = replicas.every
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        self.allocator = Allocator(device)
        self._units = build_units(module, units, lambda named: FlatBucket(named, zero, replicas, self.allocator))
        self._order = Order(self._units, zero, self._every)
        self._order.hook(module, units)
        self._has_gradients = False

    # ------------------------------------------------------------------ what users call

    def named_pieces(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name of the tensor, this rank's flat part of it): what an optimizer of this rank updates."""
        for bucket in self.buckets():
            yield from bucket.pieces.items()

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Groups for a torch optimizer: decay for tensors of two or more dimensions, by their shape before the cut."""
        dims = {slot.name: len(slot.shape) for bucket in self.buckets() for slot in bucket.slots}
        empty = nn.Parameter(torch.empty(0, device=self.allocator.device))  # no optimizer takes an empty list
        matrices = [piece for name, piece in self.named_pieces() if dims[name] >= 2]
        others = [piece for name, piece in self.named_pieces() if dims[name] < 2]
        return [
            {"params": matrices or [empty], "weight_decay": weight_decay},
            {"params": others or [nn.Parameter(empty.detach())], "weight_decay": 0.0},
        ]

    def mean_loss(self, total: Tensor, count: Tensor | int) -> Tensor:
        """() such that averaging over ranks and adding over micro-batches gives the mean over all that counts.

        `total` () is the sum of this micro-batch's losses, `count` what counts on this rank in the whole step. Sums
        over micro-batches are right when each is given the same `count`.
        """
        counted = torch.as_tensor(count, dtype=torch.float64, device=total.device).clone()
        ways = 1
        if self._every is not None:
            all_reduce(self._every, counted, Phase.COUNT).wait()
            ways = self._every.size
        return total * (ways / counted.clamp(min=1)).to(total.dtype)

    def backward(self, loss: Tensor) -> None:
        """Gradients of `loss`, added to those before; every rank calls it once a micro-batch.

        At stage 3 all ranks run the module equally often before it, whichever of its units each of them uses. Where
        that is more than once, a unit that backward has come to stays whole until its end.
        """
        self._order.begin_backward()
        if loss.requires_grad:
            torch.autograd.backward((loss,))
        self._order.end_backward()
        self._has_gradients = True

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, clip_norm: float = 0.0) -> float:
        """Update with the mean gradient; returns its norm before clipping, over all ranks (0 `clip_norm`: off).

        A norm that is not finite is one on every rank, and then nobody updates anything.
        """
        if not self._has_gradients:
            raise RuntimeError("step without a backward: call parallel.backward(loss) first")
        self._has_gradients = False
        if self.stage < 2:
            self._order.sum_all()
        trained = [bucket for bucket in self.buckets() if bucket.trainable]
        for meeting in [bucket.meet() for bucket in trained]:
            meeting.wait()
        norm = self._take_mean(trained)
        if math.isfinite(norm):
            self._update(optimizer, trained, clip_coefficient(norm, clip_norm))
        for bucket in trained:
            bucket.drop()
        return norm

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The module with every parameter whole, to read or save; collective at stage 3.

        Parameters are views of flat memory: copy (`tensor.clone()`) what is written to a file with torch.save.
        """
        for unit in self._units:
            unit.gather(Phase.FORWARD)
        try:
            yield self.module
        finally:
            for unit in self._units:
                unit.release()

    def buckets(self) -> Iterator[FlatBucket]:
        """The flat memory of all units, in their order: what a checkpoint reads and fills."""
        for unit in self._units:
            yield from unit.buckets

    @property
    def ranks(self) -> int:
        """How many train the module."""
        return self._every.size if self._every is not None else 1

    # ------------------------------------------------------------------ inside

    def _take_mean(self, trained: list[FlatBucket]) -> float:
        """Sums over ranks become means; -> their norm, one number on all ranks."""
        ways = self.ranks
        squared = torch.zeros((), dtype=torch.float64, device=self.allocator.device)
        for bucket in trained:
            assert bucket.reduced is not None
            bucket.reduced /= ways
            squared += squared_norm(bucket.counted_gradient())
        if self._every is not None:
            all_reduce(self._every, squared, Phase.NORM).wait()
        return math.sqrt(float(squared))

    def _update(self, optimizer: torch.optim.Optimizer, trained: list[FlatBucket], coefficient: float) -> None:
        for bucket in trained:
            if coefficient != 1.0 and bucket.reduced is not None:
                bucket.reduced *= coefficient
            bucket.attach()
        optimizer.step()
        for bucket in trained:
            bucket.publish()


def _replicas(mesh: Mesh, zero: int) -> Replicas:
    """Who the ranks of this one are, as `zero` needs them."""
    every = _joined(mesh, GroupName.DENSE)
    if zero == 0 or not mesh.shard_within:
        return Replicas(every, every)
    return Replicas(every, _joined(mesh, GroupName.SHARD), _joined(mesh, GroupName.COPY))


def _joined(mesh: Mesh, name: GroupName) -> Communicator | None:
    """None where this rank is alone in the group."""
    group = groups(mesh.degrees, mesh.shard_within)[name]
    return mesh.communicator(name) if group.size > 1 else None
