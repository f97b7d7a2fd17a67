"""Data parallelism and ZeRO for any module: no sharding table, no plan, the user's own loop and optimizer.

    parallel = data_parallel(module, mesh, zero=3)
    optimizer = torch.optim.AdamW(parallel.parameter_groups(weight_decay=0.1), lr=3e-4)
    for inputs, labels in batches:                      # of this rank
        for part in ...:                                # micro-batches
            parallel.backward(loss(module(part)))
        norm = parallel.step(optimizer, clip_norm=1.0)

Gradients are averaged over the ranks, as users of PyTorch expect; `mean_loss` weighs ragged batches right.

Only here hooks move data, and only where a fixed order makes it safe: whatever a rank's own control flow does, it takes
part in every gather and every sum, one unit after another.

    forward    gather 1  gather 2  gather 3 ..           a unit's hook catches up with all before it
    backward   gather 3  sum 4  gather 2  sum 3 ..       likewise, by a hook on each unit's outputs
    end        what is left over: units that this rank did not use, the root

A unit is a member of a list or sequence of modules (blocks); everything else, and every parameter that several units
use, belongs to the root, which is whole from the module's forward to the end of its backward.
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
from meshwright.comm.operations import Handle, all_reduce
from meshwright.comm.torch_private import tree_leaves
from meshwright.layout.groups import GroupName
from meshwright.optim.update import clip_coefficient, squared_norm
from meshwright.parallel.allocator import Allocator
from meshwright.parallel.flat import FlatBucket
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
    return DataParallel(module, mesh, zero, list(units) if units is not None else list(_blocks(module)))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Members of the outermost lists and sequences that have parameters."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (each for each in child if any(True for _ in each.parameters()))
        else:
            yield from _blocks(child)


class _Unit:
    """Modules that are gathered and reduced together."""

    def __init__(self, buckets: list[FlatBucket]) -> None:
        self.buckets = buckets
        self.trained = [bucket for bucket in buckets if bucket.trainable]
        self.missing = self.num_trained = sum(len(bucket.slots) for bucket in self.trained)
        self.all_trained = len(self.trained) == len(buckets)

    @property
    def has_gradients(self) -> bool:
        return any(slot.parameter.grad is not None for bucket in self.trained for slot in bucket.slots)

    def gather(self) -> None:
        for bucket in self.buckets:
            bucket.gather()

    def release(self) -> None:
        for bucket in self.buckets:
            bucket.release()


class DataParallel:
    """What trains a module that `data_parallel` changed; see there."""

    def __init__(self, module: nn.Module, mesh: Mesh, zero: int, units: list[nn.Module]) -> None:
        self.module, self.stage = module, zero
        self._over: Communicator | None = mesh.communicator(GroupName.DENSE) if mesh.degrees.dp > 1 else None
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        self.allocator = Allocator(device)
        self._units = self._build(units)
        self._forward_at = self._backward_at = self._summed = self._forwards = 0
        self._running = False
        self._under_way: Handle | None = None
        self._hook(units)

    # ------------------------------------------------------------------ what users call

    def named_pieces(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name of the tensor, this rank's flat part of it): what an optimizer of this rank updates."""
        for bucket in self._buckets():
            yield from bucket.pieces.items()

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Groups for a torch optimizer: decay for tensors of two or more dimensions, by their shape before the cut."""
        dims = {slot.name: len(slot.shape) for bucket in self._buckets() for slot in bucket.slots}
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
        if self._over is not None:
            all_reduce(self._over, counted, Phase.COUNT).wait()
            ways = self._over.size
        return total * (ways / counted.clamp(min=1)).to(total.dtype)

    def backward(self, loss: Tensor) -> None:
        """Gradients of `loss`, added to those before; every rank calls it once a micro-batch.

        At stage 3 all ranks run the module equally often before it, whichever of its units each of them uses. Where
        that is more than once, a unit that backward has come to stays whole until its end.
        """
        self._begin_backward()
        if loss.requires_grad:
            torch.autograd.backward((loss,))
        self._end_backward()

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, clip_norm: float = 0.0) -> float:
        """Update with the mean gradient; returns its norm before clipping, over all ranks (0 `clip_norm`: off).

        A norm that is not finite is one on every rank, and then nobody updates anything.
        """
        if self.stage < 2:
            for unit in reversed(self._units):
                self._sum(unit)
        self._settle()
        trained = [bucket for bucket in self._buckets() if bucket.trainable]
        ways = self._over.size if self._over is not None else 1
        squared = torch.zeros((), dtype=torch.float64, device=self.allocator.device)
        for bucket in trained:
            if bucket.reduced is None:  # no backward was run since the last step
                raise RuntimeError("step without a backward: call parallel.backward(loss) first")
            bucket.reduced /= ways
            squared += squared_norm(bucket.counted_gradient())
        if self._over is not None:
            all_reduce(self._over, squared, Phase.NORM).wait()
        norm = math.sqrt(float(squared))
        if math.isfinite(norm):
            self._update(optimizer, trained, clip_coefficient(norm, clip_norm))
        for bucket in trained:
            bucket.drop()
        return norm

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The module with every parameter whole, to read or save; collective at stage 3."""
        for unit in self._units:
            unit.gather()
        try:
            yield self.module
        finally:
            for unit in self._units:
                unit.release()

    # ------------------------------------------------------------------ inside

    def _update(self, optimizer: torch.optim.Optimizer, trained: list[FlatBucket], coefficient: float) -> None:
        for bucket in trained:
            if coefficient != 1.0 and bucket.reduced is not None:
                bucket.reduced *= coefficient
            bucket.attach()
        optimizer.step()
        for bucket in trained:
            bucket.publish()

    def _buckets(self) -> Iterator[FlatBucket]:
        for unit in self._units:
            yield from unit.buckets

    def _build(self, units: list[nn.Module]) -> list[_Unit]:
        """The root's first, then the units in order."""
        readers: dict[int, set[int]] = {}
        for index, unit in enumerate(units):
            for parameter in unit.parameters():
                readers.setdefault(id(parameter), set()).add(index)
        for name, parameter in self.module.named_parameters():  # tied to something outside of units: the root's
            inside = any(name.startswith(prefix) for prefix in _prefixes(self.module, units))
            if not inside:
                readers.setdefault(id(parameter), set()).add(-1)
        named: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(len(units) + 1)]
        for name, parameter in self.module.named_parameters():
            of = readers[id(parameter)]
            named[next(iter(of)) + 1 if len(of) == 1 else 0].append((name, parameter))
        return [_Unit(self._bucket(each)) for each in named]

    def _bucket(self, named: list[tuple[str, nn.Parameter]]) -> list[FlatBucket]:
        kinds: dict[tuple[bool, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            kinds.setdefault((parameter.requires_grad, parameter.dtype), []).append((name, parameter))
        return [FlatBucket(alike, self.stage, self._over, self.allocator) for alike in kinds.values()]

    def _hook(self, units: Sequence[nn.Module]) -> None:
        if self.stage < 2:
            return
        for place, unit in enumerate(self._units):
            for bucket in unit.trained:
                for slot in bucket.slots:
                    slot.parameter.register_post_accumulate_grad_hook(self._on_gradient(place))  # type: ignore[no-untyped-call]
        if self.stage == 3:
            self.module.register_forward_pre_hook(lambda *_: self._begin_forward())
            self.module.register_forward_hook(lambda *_: self._end_forward(), always_call=True)
            for place, module in enumerate(units, 1):
                module.register_forward_pre_hook(lambda *_, place=place: self._enter(place))
                module.register_forward_hook(lambda _m, _i, out, place=place: self._leave(place, out), always_call=True)

    def _begin_forward(self) -> None:
        self._forward_at = 0
        self._forwards += torch.is_grad_enabled()
        self._enter(0)

    def _enter(self, place: int) -> None:
        """Take part in every gather up to `place`; only that unit, and the root, stay whole."""
        for passed in range(self._forward_at, place):
            self._units[passed].gather()
            if passed:
                self._units[passed].release()
        self._forward_at = max(self._forward_at, place + 1)
        self._units[place].gather()

    def _leave(self, place: int, outputs: Any) -> None:
        self._units[place].release()
        if torch.is_grad_enabled():
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _, place=place: self._reach(place))  # type: ignore[no-untyped-call]

    def _end_forward(self) -> None:
        if self._forward_at < len(self._units):
            self._enter(len(self._units) - 1)
            self._units[-1].release()
        if not torch.is_grad_enabled():
            self._units[0].release()

    def _begin_backward(self) -> None:
        if self.stage == 3 and not self._forwards:  # this rank had nothing to compute; the others need its pieces
            self._begin_forward()
            self._end_forward()
        self._running, self._backward_at, self._summed = True, len(self._units), len(self._units)
        for unit in self._units:
            unit.missing = unit.num_trained
        self._units[0].gather()

    def _reach(self, place: int) -> None:
        """Backward comes to a unit: sum those behind it and gather those before it, in one order on all ranks."""
        while self._backward_at > place:
            self._backward_at -= 1
            if self._passes_once:
                self._sum_down_to(self._backward_at + 1)
            self._units[self._backward_at].gather()
            if self._backward_at != place and self._passes_once:
                self._units[self._backward_at].release()
        self._units[place].gather()

    @property
    def _passes_once(self) -> bool:
        """Whether backward is done with a unit once it is past it.

        After several forwards an earlier one comes to it again, on some ranks perhaps: it stays whole and is summed at
        the end, for nobody may gather it a second time alone.
        """
        return self._forwards == 1

    def _end_backward(self) -> None:
        if self.stage == 3:
            self._reach(0)
        if self.stage >= 2:
            self._sum_down_to(0)
            self._sum_late()
            self._settle()
        self._running, self._forwards = False, 0
        for unit in self._units:
            unit.release()

    def _on_gradient(self, place: int) -> Any:
        def arrived(_: Tensor) -> None:
            unit = self._units[place]
            unit.missing -= 1
            if not self._running or unit.missing:
                return
            if self.stage == 3:
                # A frozen weight may still be needed for what enters the unit.
                if place and unit.all_trained and self._passes_once:
                    unit.release()
            else:
                while self._summed and self._units[self._summed - 1].missing == 0:
                    self._sum_down_to(self._summed - 1)

        return arrived

    def _sum_down_to(self, place: int) -> None:
        """Sum the units from the last one on that were not summed in this backward, one under way at a time."""
        while self._summed > place:
            self._summed -= 1
            self._sum(self._units[self._summed])

    def _sum_late(self) -> None:
        """Gradients that came after their unit was summed, on any rank: an unusual graph, but no gradient is lost."""
        late = torch.tensor([float(unit.has_gradients) for unit in self._units], dtype=torch.float64)
        late = late.to(self.allocator.device)
        self._settle()
        if self._over is not None:
            all_reduce(self._over, late, Phase.REDUCE).wait()
        for unit, count in zip(reversed(self._units), reversed(late.tolist()), strict=True):
            if count:
                self._sum(unit)

    def _sum(self, unit: _Unit) -> None:
        for bucket in unit.trained:
            self._settle()
            bucket.collect()
            self._under_way = bucket.reduce()

    def _settle(self) -> None:
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None


def _prefixes(module: nn.Module, units: Sequence[nn.Module]) -> list[str]:
    inside = {id(unit) for unit in units}
    return [f"{name}." for name, each in module.named_modules() if id(each) in inside]
